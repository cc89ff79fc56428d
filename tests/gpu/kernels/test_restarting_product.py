"""The restarting product on a Hopper GPU: the bits of fixed tiles for each piece and of additions in tree order."""

from itertools import product

import pytest
import torch

from tests.gpu.kernels.operands import beside_another_stream, normal_on_gpu
from tests.operands import same_bits
from tp_invariant_recipes.kernels.products import restarting_product as kernel
from tp_invariant_recipes.kernels.products.restarting_product import Cut
from tp_invariant_recipes.numerics.products import contraction
from tp_invariant_recipes.numerics.products import product as products
from tp_invariant_recipes.numerics.products.probe import cancelling
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of compute capability 9.0"),
    pytest.mark.usefixtures("settings_of_a_run"),
]

# m, n, size of a piece: layers of Qwen3-8B at tp=4 and 8192 tokens, small and ragged ones.
SHAPES = ((8192, 4096, 512), (2048, 4096, 1536), (128, 128, 64), (1000, 520, 192), (33, 4, 64), (1, 1028, 128))
CUTS = (
    Cut(range(2), 2, 1), Cut(range(1), 1, 2), Cut(range(4), 4, 1), Cut(range(2), 2, 2), Cut(range(4, 8), 8, 1),
    Cut(range(2, 4), 4, 2),
)  # fmt: skip


def operands(m, n, size, cut, transposed):
    k = size * cut.all_shards * cut.segments
    a = normal_on_gpu(m, k, dtype=torch.bfloat16)
    b = normal_on_gpu(n, k, dtype=torch.bfloat16).t() if transposed else normal_on_gpu(k, n, dtype=torch.bfloat16)
    return a, b, torch.randn(m, n, device="cuda")


def both(a, b, out, cut, add):
    first, other = out.clone(), out.clone()
    kernel.restarting_product(a, b, first, cut, add)
    kernel.in_order(a, b, other, cut, add)
    return first, other


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_has_the_bits_of_fixed_tiles(shape, cut):
    for transposed, add in product((False, True), repeat=2):
        a, b, out = operands(*shape, cut, transposed)
        assert kernel.suits(a, b, cut) == (transposed or shape[1] % 8 == 0)  # rows of b have 16 bytes
        if not kernel.suits(a, b, cut):
            continue
        for fill in (lambda *_: None, lambda x, y: cancelling(x, y, torch.Generator("cuda").manual_seed(1))):
            fill(a, b)
            first, other = both(a, b, out, cut, add)
            assert same_bits(first, other), (transposed, add)


def test_it_repeats_beside_another_stream():
    cut = Cut(range(2), 2, 2)
    a, b, out = operands(4096, 4096, 768, cut, False)
    _, expected = both(a, b, out, cut, False)
    for _ in beside_another_stream():
        kernel.restarting_product(a, b, out, cut, False)
        assert same_bits(out, expected)


@pytest.mark.parametrize("cut", (Cut(range(2), 2, 1), Cut(range(4), 4, 1)), ids=str)
def test_other_borders_have_other_bits(cut):
    """The control: without a border in the middle, and with the pieces added one after the other."""
    a, b, out = operands(256, 256, 512, cut, True)
    first, other = both(a, b, out, cut, False)
    assert same_bits(first, other)
    assert not same_bits(first, products.product(a, b, torch.empty_like(out)))
    if cut.pieces == 4:
        looped = torch.zeros_like(out)
        for k in cut.slices(a.shape[1]):
            products.product(a[:, k], b[k], looped, add=True)
        assert not same_bits(first, looped)


@pytest.mark.parametrize("shards, segments", ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2)))
def test_a_rank_has_the_same_sums(monkeypatch, shards, segments):
    """Of all nodes, whatever computes them; and within the capture of a CUDA graph, after a trial."""
    mesh, sizes = VirtualMesh(shards, 1, 0, graphs=True), (256 * shards,) * segments
    a = normal_on_gpu(512, sum(sizes), dtype=torch.bfloat16)
    b = normal_on_gpu(sum(sizes), 384, dtype=torch.bfloat16)
    monkeypatch.setattr(contraction, "_restarting_is_exact", {})
    sums = contraction.nodes(a, b, mesh, sizes, products.product)
    assert list(contraction._restarting_is_exact.values()) == [True] * len(contraction._restarting_is_exact)
    assert bool(contraction._restarting_is_exact) == (shards * segments > 1)
    separate = contraction._looped(a, b, mesh, sizes, products.product)
    assert same_bits(products_sum(sums), products_sum(separate))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = contraction.nodes(a, b, mesh, sizes, products.product)
    a.copy_(torch.randn_like(a))
    graph.replay()
    assert same_bits(captured, contraction.nodes(a, b, mesh, sizes, products.product))
    assert not same_bits(captured, sums)


def products_sum(nodes):
    while len(nodes) > 1:
        nodes = nodes[::2] + nodes[1::2]
    return nodes[0]


def test_a_wrong_kernel_is_refused(monkeypatch):
    """The control of the trial: fixed tiles that do not restart, and that add backwards."""
    cut = Cut(range(4), 4, 1)
    a, b, out = operands(128, 128, 64, cut, False)

    def without_borders(a, b, out, cut, add):
        products.product(a, b, out, add=add)

    def backwards(a, b, out, cut, add):
        slices = cut.slices(a.shape[1])
        total = torch.zeros_like(out)
        for k in reversed(slices):
            products.product(a[:, k], b[k], total, add=True)
        out.copy_(out + total if add else total)

    for wrong in (without_borders, backwards):
        monkeypatch.setattr(contraction, "_restarting_is_exact", {})
        monkeypatch.setattr(kernel, "restarting_product", wrong)
        assert not contraction._matches_definition(a, b, out, cut, add=False)
    monkeypatch.undo()
    monkeypatch.setattr(contraction, "_restarting_is_exact", {})
    assert contraction._matches_definition(a, b, out, cut, add=False)
