# SPDX-License-Identifier: Apache-2.0
"""The experts' kernels on one GPU: right, and no bit of a row or an expert depends on what lies beside it."""

import pytest
import torch

from tests.gpu.kernels.operands import normal_on_gpu
from tests.operands import same_bits
from tp_invariant_recipes.kernels.gemm import grouped_gemm as grouped_gemm_module
from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups, grouped_gemm, grouped_weight_gradient

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16)
# Tokens of each expert, n, k: Qwen3-30B-A3B's and Nemotron-3-Nano's, both products of each, and a small ragged one.
CASES = (
    ((512, 0, 700, 1, 129, 128, 60), 1536, 2048), ((512, 0, 700, 1, 129, 128, 60), 2048, 768),
    ((300, 1000), 1856, 2688), ((300, 1000), 2688, 1856), ((3, 0, 70), 40, 24),
)  # fmt: skip


def _all(x, dy, weights, sizes):
    """Output, input gradient and weight gradients of experts."""
    groups = Groups(sizes, torch.tensor(sizes, device=x.device))
    y, dx = torch.empty(len(x), weights[0].shape[0], dtype=x.dtype, device="cuda"), torch.empty_like(x)
    grouped_gemm(x, weights, y, groups, transposed=True)
    grouped_gemm(dy, weights, dx, groups, transposed=False)
    outs = [torch.ones(weight.shape, device="cuda") for weight in weights]
    grouped_weight_gradient(dy, x, outs, groups)
    return y, dx, outs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chain", ((0, 1), (0, 2, 1, 3)), ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sources_of_an_expert_are_added_in_order(case, chain, dtype):
    sizes, n, k = case
    sizes = sizes[: len(sizes) // len(chain) * len(chain)] or (*sizes, *sizes)[: len(chain)]
    groups = Groups(sizes, torch.tensor(sizes, device="cuda"))
    x, dy = normal_on_gpu(sum(sizes), k, dtype=dtype), normal_on_gpu(sum(sizes), n, dtype=dtype)
    each = [torch.zeros(n, k, device="cuda") for _ in sizes]
    grouped_weight_gradient(dy, x, each, groups)
    outs = [normal_on_gpu(n, k, dtype=torch.float32) for _ in range(len(sizes) // len(chain))]
    expected, other = ([out.clone() for out in outs] for _ in range(2))
    for number, out in enumerate(expected):
        for link in chain:
            out += each[number * len(chain) + link]
            other[number] += each[number * len(chain) + chain[-1 - link]]
    grouped_weight_gradient(dy, x, outs, groups, chain)
    assert all(map(same_bits, outs, expected))
    assert dtype != torch.bfloat16 or n < 100 or not all(map(same_bits, outs, other))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_products(case, dtype, monkeypatch):
    sizes, n, k = case
    x, dy = normal_on_gpu(sum(sizes), k, dtype=dtype), normal_on_gpu(sum(sizes), n, dtype=dtype)
    weights = [normal_on_gpu(n, k, dtype=dtype) for _ in sizes]
    y, dx, outs = _all(x, dy, weights, sizes)
    with monkeypatch.context() as by_address:
        by_address.setattr(grouped_gemm_module, "_copies_tiles", lambda *_: False)
        assert all(map(same_bits, _all(x, dy, weights, sizes)[:2], (y, dx)))
    at = 0
    for size, weight, out in zip(sizes, weights, outs, strict=True):
        rows = slice(at, at + size)
        at += size
        expected = (x[rows].double() @ weight.double().t(), dy[rows].double() @ weight.double())
        for result, correct in zip((y[rows], dx[rows]), expected, strict=True):
            assert (result - correct).norm() <= (1e-4 if dtype == torch.float32 else 5e-3) * correct.norm()
        correct = 1 + dy[rows].double().t() @ x[rows].double()
        assert (out - correct).norm() < 1e-4 * correct.norm()
        alone = _all(x[rows].clone(), dy[rows].clone(), [weight.clone()], (size,))
        assert same_bits(alone[0], y[rows])
        assert same_bits(alone[1], dx[rows])
        assert same_bits(alone[2][0], out)


def test_a_library_product_does_depend_on_its_rows():
    """Why this is needed: cuBLAS chooses by the number of rows."""
    differs = False
    for n, k in ((1536, 2048), (2048, 768), (256, 8192), (4096, 12288)):
        x, weight = normal_on_gpu(2048, k, dtype=torch.bfloat16), normal_on_gpu(n, k, dtype=torch.bfloat16)
        whole = x @ weight.t()
        differs |= not all(same_bits(x[:rows] @ weight.t(), whole[:rows]) for rows in (1, 8, 60, 129, 512))
    assert differs


@pytest.mark.parametrize("experts, topk", ((8, 2), (128, 8), (128, 6)))
@pytest.mark.parametrize("score", ("softmax", "sigmoid"))
def test_megatrons_routing_is_row_by_row(score, experts, topk):
    """What the invariant router leaves to Megatron and torch, forward and backward."""
    from megatron.core.transformer.moe.moe_utils import (
        compute_routing_scores_for_aux_loss,
        topk_routing_with_score_function,
    )

    torch.use_deterministic_algorithms(True)
    logits, seen = torch.randn(4096, experts, device="cuda"), torch.randn(4096, experts, device="cuda")

    def routed(rows):
        x = logits[rows].clone().requires_grad_()
        probs, chosen = topk_routing_with_score_function(x, topk, score_function=score, scaling_factor=2.5)
        chosen_too, scores = compute_routing_scores_for_aux_loss(x, topk, score)
        ((probs + scores) * seen[rows]).sum().backward()
        return probs.detach(), chosen, scores.detach(), chosen_too, x.grad

    try:
        whole = routed(slice(None))
        for rows in (slice(0, 1024), slice(1024, 1536), slice(4000, 4096)):
            assert all(torch.equal(part, all_of[rows]) for part, all_of in zip(routed(rows), whole, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
