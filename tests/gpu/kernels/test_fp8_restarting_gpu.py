"""The restarting product of FP8 on a Hopper GPU: the bits of the definition for each piece, added in tree order."""

import pytest
import torch

from tests.fp8_operands import operands
from tests.gpu.kernels.operands import beside_another_stream
from tests.gpu.kernels.test_fp8_product_gpu import drawn, on_gpu
from tests.gpu.kernels.test_restarting_product import CUTS, pytestmark  # noqa: F401 -- the marks hold here too
from tests.operands import same_bits
from tp_invariant_recipes.kernels.products import restarting_product as kernel
from tp_invariant_recipes.kernels.products.quantize import E4M3, E5M2
from tp_invariant_recipes.kernels.products.restarting_product import Cut
from tp_invariant_recipes.numerics.products import contraction, fp8
from tp_invariant_recipes.numerics.products.probe import DRAWS
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import tree_sum

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = ("tensor", "128x128")
# m, n, size of a piece: layers of Qwen3-8B at tp=4, small and ragged ones.
SHAPES = ((8192, 4096, 512), (2048, 4096, 1536), (128, 128, 128), (1000, 520, 384), (33, 8, 128), (1, 1032, 256))


@pytest.fixture(autouse=True)
def _nothing_is_decided(monkeypatch):
    monkeypatch.setattr(contraction, "_restarting_is_exact", {})


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_has_the_bits_of_fixed_tiles(kind, cut):
    first = CUTS.index(cut)  # every size of a piece is a compilation
    for (m, n, size), dtype in zip((SHAPES[first], SHAPES[first - 3]), (E4M3, E5M2), strict=True):
        a, b = drawn(kind, m, n, size * cut.all_shards * cut.segments, (dtype, E4M3))
        assert kernel.suits(a, b, cut)
        for fill in (lambda *_: None, *DRAWS):
            fill(a, b, torch.Generator("cuda").manual_seed(1))
            for out, add in ((BF16, False), (FP32, False), (FP32, True)):
                there = torch.randn(m, n, device="cuda").to(out)
                expected = there.clone()
                kernel.restarting_product(a, b, there, cut, add)
                kernel.in_order(a, b, expected, cut, add)
                assert same_bits(there, expected), (m, n, size, fill, out, add)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_has_the_sums_of_a_cpu(kind):
    """Whatever its shards and segments, without and within the capture of a CUDA graph; and ends the tree in bf16."""
    for shards, segments in ((2, 1), (1, 2), (2, 2), (4, 1), (8, 1), (4, 2)):
        sizes, mesh = (256 * shards,) * segments, VirtualMesh(shards, 1, 0, graphs=True)
        a, b = operands(kind, 40, 136, sum(sizes), (E5M2, E4M3))
        expected = tree_sum(fp8.nodes(a, b, VirtualMesh(shards, 1, 0), sizes), BF16)
        x, y = on_gpu(a), on_gpu(b)
        for dtype in (BF16, FP32):
            assert same_bits(tree_sum(fp8.nodes(x, y, mesh, sizes, dtype), BF16).cpu(), expected), (shards, segments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = tree_sum(fp8.nodes(x, y, mesh, sizes, BF16), BF16)
        graph.replay()
        assert same_bits(captured.cpu(), expected), (shards, segments)
    assert len(contraction._restarting_is_exact) >= 8
    assert set(contraction._restarting_is_exact.values()) == {True}


def test_it_repeats_beside_another_stream():
    cut = Cut(range(2), 2, 2)
    a, b = drawn("tensor", 4096, 4096, 4 * 768, (E5M2, E4M3))
    out, expected = torch.empty(2, 4096, 4096, device="cuda", dtype=BF16)
    kernel.in_order(a, b, expected, cut, False)
    for _ in beside_another_stream():
        kernel.restarting_product(a, b, out, cut, False)
        assert same_bits(out, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_other_borders_have_other_bits(kind):
    """The control: without a border in the middle, and with the pieces added one after the other."""
    cut = Cut(range(4), 4, 1)
    a, b = drawn(kind, 256, 256, 2048, (E4M3, E4M3))
    out, whole, in_turn = torch.zeros(3, 256, 256, device="cuda")
    kernel.restarting_product(a, b, out, cut, False)
    fp8.product(a, b, whole)
    for k in cut.slices(2048):
        fp8.product(*(x.along_k(k.start, 512) for x in (a, b)), in_turn, add=True)
    assert not same_bits(out, whole)
    assert not same_bits(out, in_turn)
    torch.testing.assert_close(out, whole, rtol=1e-4, atol=0.5)  # not another sum
