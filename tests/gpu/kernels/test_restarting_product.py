# SPDX-License-Identifier: Apache-2.0
"""The restarting product on a Hopper GPU: the bits of fixed tiles for each piece and of additions in tree order.

Of bf16, and of FP8 by tensors and by blocks.
"""

from itertools import product

import pytest
import torch

from tests.fp8_operands import operands
from tests.gpu.kernels.operands import beside_another_stream
from tests.gpu.kernels.test_products_gpu import FORMS, _fp8, generator
from tests.kernel_table import moved
from tests.operands import same_bits
from tp_invariant_recipes.kernels.gemm import segmented_k_gemm as kernel
from tp_invariant_recipes.kernels.gemm.quantize import E4M3, E5M2
from tp_invariant_recipes.kernels.gemm.segmented_k_gemm import Cut
from tp_invariant_recipes.numerics.gemm import contraction, fp8
from tp_invariant_recipes.numerics.gemm import gemm as gemms
from tp_invariant_recipes.numerics.gemm.probe import DRAWS, cancelling
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import tree_sum

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of compute capability 9.0"),
    pytest.mark.usefixtures("settings_of_a_run"),
]
BF16, FP32 = torch.bfloat16, torch.float32

# m, n, size of a piece: layers of Qwen3-8B at tp=4 and 8192 tokens, small and ragged ones; of FP8 in blocks of 128.
SHAPES = ((8192, 4096, 512), (2048, 4096, 1536), (128, 128, 64), (1000, 520, 192), (33, 4, 64), (1, 1028, 128))
OF_FP8 = ((8192, 4096, 512), (2048, 4096, 1536), (128, 128, 128), (1000, 520, 384), (33, 8, 128), (1, 1032, 256))
CUTS = (
    Cut(range(2), 2, 1), Cut(range(1), 1, 2), Cut(range(4), 4, 1), Cut(range(2), 2, 2), Cut(range(4, 8), 8, 1),
    Cut(range(2, 4), 4, 2), Cut(range(8, 16), 16, 1), Cut(range(8), 8, 2),
)  # fmt: skip
OUTPUTS = ((BF16, False), (FP32, False), (FP32, True))  # and whether the sum is added to it
KINDS = ("tensor", "128x128")


@pytest.fixture(autouse=True)
def _nothing_is_decided(monkeypatch):
    monkeypatch.setattr(contraction, "_restarting_is_exact", {})


def drawn(name, m, n, size, cut, transposed=True, types=(E4M3, E4M3)):
    """Operands of a cut's pieces. transposed: b of bf16 lies by columns."""
    form = FORMS["bf16"] if name == "bf16" else _fp8(name, types)
    a, b = form.drawn(m, size * cut.all_shards * cut.segments, n)
    return a, b.t().contiguous().t() if name == "bf16" and transposed else b


def both(a, b, out, cut, add):
    first, other = out.clone(), out.clone()
    kernel.segmented_k_gemm(a, b, first, cut, add)
    kernel.in_order(a, b, other, cut, add)
    return first, other


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_has_the_bits_of_fixed_tiles(shape, cut):
    m, n, size = shape
    for transposed, (dtype, add) in product((False, True), OUTPUTS):
        a, b = drawn("bf16", m, n, size, cut, transposed)
        assert kernel.suits(a, b, cut) == (n % 8 == 0)  # rows of b and of the output have 16 bytes
        for fill in (lambda *_: None, lambda x, y: cancelling(x, y, generator())) if kernel.suits(a, b, cut) else ():
            fill(a, b)
            first, other = both(a, b, torch.randn(m, n, device="cuda").to(dtype), cut, add)
            assert same_bits(first, other), (transposed, dtype, add)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_of_fp8_it_has_the_bits_of_fixed_tiles(kind, cut):
    at = CUTS.index(cut)  # every size of a piece is a compilation
    for (m, n, size), dtype in zip((OF_FP8[at % 6], OF_FP8[at - 3]), (E4M3, E5M2), strict=True):
        a, b = drawn(kind, m, n, size, cut, types=(dtype, E4M3))
        assert kernel.suits(a, b, cut)
        for fill, (out, add) in product((lambda *_: None, *DRAWS), OUTPUTS):
            fill(a, b, generator())
            first, other = both(a, b, torch.randn(m, n, device="cuda").to(out), cut, add)
            assert same_bits(first, other), (m, n, size, fill, out, add)


@pytest.mark.parametrize("name, dtype", (("bf16", FP32), ("tensor", BF16)))
def test_it_repeats_beside_another_stream(name, dtype):
    cut = Cut(range(2), 2, 2)
    a, b = drawn(name, 4096, 4096, 768, cut, transposed=False, types=(E5M2, E4M3))
    out = torch.empty(4096, 4096, device="cuda", dtype=dtype)
    _, expected = both(a, b, out, cut, False)
    for _ in beside_another_stream():
        kernel.segmented_k_gemm(a, b, out, cut, False)
        assert same_bits(out, expected)


@pytest.mark.parametrize("name", ("bf16", *KINDS))
def test_other_borders_have_other_bits(name):
    """The control: without a border in the middle, and with the pieces added one after the other."""
    cut = Cut(range(4), 4, 1)
    form, (a, b) = FORMS["bf16" if name == "bf16" else f"FP8, {name}"], drawn(name, 256, 256, 512, cut)
    whole, in_turn = torch.zeros(2, 256, 256, device="cuda")
    first, other = both(a, b, torch.zeros_like(whole), cut, False)
    assert same_bits(first, other)
    form.product(a, b, whole, False)
    for k in cut.slices(2048):
        parts = (a[:, k], b[k]) if name == "bf16" else (x.along_k(k.start, 512) for x in (a, b))
        form.product(*parts, in_turn, True)
    assert not same_bits(first, whole)
    assert not same_bits(first, in_turn)
    torch.testing.assert_close(first, whole, rtol=1e-4, atol=0.5)  # not another sum


@pytest.mark.parametrize("shards, segments", ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2)))
def test_a_rank_has_the_same_sums(shards, segments):
    """Of all nodes, whatever computes them; and within the capture of a CUDA graph, after a trial."""
    mesh, sizes = VirtualMesh(shards, 1, 0, graphs=True), (256 * shards,) * segments
    a, b = FORMS["bf16"].drawn(512, sum(sizes), 384)
    sums = contraction.nodes(a, b, mesh, sizes, gemms.gemm)
    root = contraction.nodes(a, b, mesh, sizes, gemms.gemm, BF16)
    assert same_bits(tree_sum(root, BF16), tree_sum(sums, BF16))
    assert set(contraction._restarting_is_exact.values()) == ({True} if shards * segments > 1 else set())
    separate = contraction._looped(a, b, mesh, sizes, gemms.gemm)
    assert same_bits(tree_sum(sums), tree_sum(separate))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = contraction.nodes(a, b, mesh, sizes, gemms.gemm)
    a.copy_(torch.randn_like(a))
    graph.replay()
    assert same_bits(captured, contraction.nodes(a, b, mesh, sizes, gemms.gemm))
    assert not same_bits(captured, sums)


@pytest.mark.parametrize("kind", KINDS)
def test_of_fp8_a_rank_has_the_sums_of_a_cpu(kind):
    """Without and within the capture of a CUDA graph; and it ends the tree in bf16."""
    for shards, segments in ((2, 1), (1, 2), (2, 2), (4, 1), (8, 1), (4, 2)):
        sizes, mesh = (256 * shards,) * segments, VirtualMesh(shards, 1, 0, graphs=True)
        a, b = operands(kind, 40, 136, sum(sizes), (E5M2, E4M3))
        expected = tree_sum(fp8.nodes(a, b, VirtualMesh(shards, 1, 0), sizes), BF16)
        x, y = moved(a), moved(b)
        for dtype in (BF16, FP32):
            assert same_bits(tree_sum(fp8.nodes(x, y, mesh, sizes, dtype), BF16).cpu(), expected), (shards, segments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = tree_sum(fp8.nodes(x, y, mesh, sizes, BF16), BF16)
        graph.replay()
        assert same_bits(captured.cpu(), expected), (shards, segments)
    assert len(contraction._restarting_is_exact) >= 8
    assert set(contraction._restarting_is_exact.values()) == {True}


def test_a_wrong_kernel_is_refused(monkeypatch):
    """The control of the trial: fixed tiles that do not restart, and that add backwards."""
    cut = Cut(range(4), 4, 1)
    a, b = drawn("bf16", 128, 128, 64, cut, transposed=False)
    out = torch.randn(128, 128, device="cuda")

    def without_borders(a, b, out, cut, add):
        gemms.gemm(a, b, out, add=add)

    def backwards(a, b, out, cut, add):
        total = torch.zeros_like(out)
        for k in reversed(cut.slices(a.shape[1])):
            gemms.gemm(a[:, k], b[k], total, add=True)
        out.copy_(out + total if add else total)

    for wrong in (without_borders, backwards):
        with monkeypatch.context() as patched:
            patched.setattr(contraction, "_restarting_is_exact", {})
            patched.setattr(kernel, "segmented_k_gemm", wrong)
            assert not contraction._matches_definition(a, b, out, cut, add=False)
    assert contraction._matches_definition(a, b, out, cut, add=False)
