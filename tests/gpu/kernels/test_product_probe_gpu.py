"""What the trial of products decides on this GPU for every product of the models' linear layers, and that it holds.

Run with -s to see the decisions: products of cuBLAS, of all kinds of product; fixed tiles compute the others.
"""

import pytest
import torch

from tests.gpu.kernels.operands import normal_on_gpu
from tp_invariant_recipes.numerics.layers.linear.linear import column_parallel, row_parallel
from tp_invariant_recipes.numerics.products import cublas, defined
from tp_invariant_recipes.numerics.products.probe import cancelling
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("settings_of_a_run"),
]

# name: V, then (kind, features in, features out, segments) of each linear layer, as in conf/model/
COLUMN, ROW = column_parallel, row_parallel
MODELS = {
    "qwen3_0p6b": (8, ((COLUMN, 1024, 4096, 1), (ROW, 2048, 1024, 1), (COLUMN, 1024, 6144, 2), (ROW, 3072, 1024, 1))),
    "qwen3_8b": (8, ((COLUMN, 4096, 6144, 1), (ROW, 4096, 4096, 1), (COLUMN, 4096, 24576, 2), (ROW, 12288, 4096, 1))),
    "qwen3_30b_a3b": (4, ((COLUMN, 2048, 5120, 1), (ROW, 4096, 2048, 1))),
    "qwen3_0p6b output layer": (8, ((COLUMN, 1024, 151936, 1),)),
    "qwen3_8b output layer": (8, ((COLUMN, 4096, 151936, 1),)),
}


@pytest.mark.parametrize("tokens", (2048, 8192))
@pytest.mark.parametrize("degree", (1, 2, 4))
@pytest.mark.parametrize("model", MODELS)
def test_every_product_of_a_layer_holds_on_live_operands(monkeypatch, model, degree, tokens):
    """Forward, input and weight gradient with TPI_CHECK_PRODUCTS=1: random, wide and cancelling operands."""
    monkeypatch.setattr(defined, "_cublas_is_exact", {})
    monkeypatch.setattr(cublas, "checking", lambda: True)
    shards, layers = MODELS[model]
    mesh = VirtualMesh(shards // degree, 1, 0)  # a rank of tp=degree, with nobody to talk to: only products count
    for layer, k, n, segments in layers:
        held = {COLUMN: (k, n // degree), ROW: (k // degree, n)}[layer]
        for values in (_normal, _wide, _sums_that_cancel):
            x, weight = values(tokens, *held)
            weight.main_grad = torch.zeros(weight.shape, device="cuda")
            x.requires_grad_()
            weight.requires_grad_()
            y = layer(x, weight, mesh, *((segments, False) if layer is COLUMN else (False,)))
            for _ in range(2):  # the second adds to the gradient of the first
                y.backward(torch.randn_like(y), retain_graph=True)
    decided = dict(defined._cublas_is_exact)
    print(
        f"\n{model} tp={degree} {tokens} tokens: {sum(decided.values())} of {len(decided)} kinds of product by cuBLAS"
    )
    for key, exact in decided.items():
        if not exact:
            print("  fixed tiles:", *key[:8])
    assert any(decided.values())  # a trial that always refuses fails here


def _normal(tokens, k, n):
    return normal_on_gpu(tokens, 1, k, dtype=torch.bfloat16), normal_on_gpu(n, k, dtype=torch.bfloat16)


def _wide(tokens, k, n):
    scale = torch.randint(-12, 12, (k,), device="cuda").float().exp2()
    x, weight = _normal(tokens, k, n)
    return (x.float() * scale).bfloat16(), weight


def _sums_that_cancel(tokens, k, n):
    x, weight = _normal(tokens, k, n)
    cancelling(x[:, 0], weight.t(), torch.Generator("cuda").manual_seed(1))
    return x, weight


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_a_product_with_k_in_another_order_is_refused(monkeypatch, dtype):
    """The control: cuBLAS itself, on operands that are cut in half along k."""
    launch = cublas.launch

    def in_halves(a, b, out, add):
        half = a.shape[1] // 2
        first, second = (a[:, :half], b[:half]), (a[:, half:], b[half:])
        total = torch.zeros(out.shape, device="cuda")
        for x, y in (first, second):
            launch(x.contiguous(), y.contiguous(), total, True)
        return out.copy_(total + out.float() if add else total)

    monkeypatch.setattr(defined, "_cublas_is_exact", {})
    monkeypatch.setattr(cublas, "launch", in_halves)
    for shape in ((128, 16, 128), (2048, 1024, 384), (2048, 4096, 768)):
        m, k, n = shape
        a, b, out = torch.empty(m, k), torch.empty(k, n), torch.empty(m, n)
        a, b, out = (t.to("cuda", dtype) for t in (a, b, out))
        assert not defined._matches_definition(a, b, out, False), shape
