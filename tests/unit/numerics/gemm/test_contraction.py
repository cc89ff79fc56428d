# SPDX-License-Identifier: Apache-2.0
"""The sum over a rank's shards: several products in one launch have the bits of one by one, or are refused.

The kernel itself runs on GPUs only (tests/gpu/kernels/test_restarting_product.py). Here products of fixed tiles stand
for it.
"""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from triton.errors import TritonError

from tests.fp8_operands import operands as fp8_operands
from tests.operands import same_bits
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.gemm import segmented_k_gemm as kernel
from tp_invariant_recipes.kernels.gemm.fixed_tile_gemm import fixed_tile_gemm
from tp_invariant_recipes.kernels.gemm.quantize import E4M3, E5M2, Quantized
from tp_invariant_recipes.kernels.gemm.segmented_k_gemm import Cut
from tp_invariant_recipes.numerics.gemm import contraction, cublas, fp8
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import tree_sum

PIECE = 16
# shards of a rank, segments -> the shards of each launch, and the node that it adds to.
LAUNCHES = {
    (2, 1): ([range(2)], [0]),
    (4, 1): ([range(4)], [0]),
    (16, 1): ([range(16)], [0]),
    (32, 1): ([range(16), range(16, 32)], [0, 0]),
    (1, 2): ([range(1)], [0]),
    (8, 2): ([range(8)], [0]),
    (16, 2): ([range(8), range(8, 16)], [0, 0]),
    (32, 2): ([range(8), range(8, 16), range(16, 24), range(24, 32)], [0, 0, 1, 1]),
}


def exact_product(a, b, out, *, add=False):
    return fixed_tile_gemm(a, b, out, add=add)


def segmented_operands(shards, segments):
    generator = torch.Generator().manual_seed(shards)
    k = PIECE * shards * segments
    a, b = torch.randn(24, k, generator=generator), torch.randn(k, 20, generator=generator)
    return a.bfloat16(), b.bfloat16(), (k // segments,) * segments


def folded_nodes(nodes):
    while len(nodes) > 1:
        nodes = nodes[::2] + nodes[1::2]
    return nodes[0]


def exact_batch(a, b, out, add):
    for first, other, term in zip(a, b, out, strict=True):
        fixed_tile_gemm(first, other, term, add=add)


@pytest.fixture
def batch_stand_in(monkeypatch):
    """Have a function stand for cuBLAS's batches, on a CPU. returns: their shapes, as they come."""

    def use(compute):
        launches = []

        def launch(a, b, out, add):
            launches.append((*a.shape, b.shape[2], add))
            compute(a, b, out, add)

        monkeypatch.setattr(contraction, "_batch_is_exact", {})
        monkeypatch.setattr(cublas, "launch_batch", launch)
        return launches

    return use


@pytest.fixture
def kernel_stand_in(monkeypatch):
    """Have the function given stand for the kernel, on a CPU. returns: its launches, as they come."""

    def use(compute):
        launches = []

        def launch(a, b, out, cut, add):
            launches.append((cut.shards, out.data_ptr(), add))
            compute(a, b, out, cut, add)

        contraction._imports.cache_clear()
        contraction._say_off.cache_clear()
        monkeypatch.setattr(contraction, "_restarting_is_exact", {})
        monkeypatch.setattr(contraction, "_batch_is_exact", {})
        monkeypatch.setattr(cublas, "launch_batch", exact_batch)
        monkeypatch.setattr(kernel, "suits", lambda a, b, cut: cut.pieces in kernel.PIECES)
        monkeypatch.setattr(kernel, "segmented_k_gemm", launch)
        return launches

    return use


@pytest.mark.parametrize("shards, segments", LAUNCHES)
def test_several_at_once_have_the_bits_of_one_by_one(kernel_stand_in, shards, segments):
    launches = kernel_stand_in(kernel.in_order)
    a, b, sizes = segmented_operands(shards, segments)
    mesh = VirtualMesh(shards, 1, 0, graphs=True)
    contraction.nodes(a, b, mesh, sizes, exact_product)  # with its trials
    launches.clear()
    nodes = contraction.nodes(a, b, mesh, sizes, exact_product)
    cuts, places = LAUNCHES[shards, segments]
    assert [shards for shards, _, _ in launches] == cuts
    assert [to for _, to, _ in launches] == [nodes[place].data_ptr() for place in places]
    assert [add for _, _, add in launches] == [place in places[:n] for n, place in enumerate(places)]
    separate = contraction._looped(a, b, mesh, sizes, exact_product)
    assert same_bits(folded_nodes(nodes), folded_nodes(separate))
    root = contraction.nodes(a, b, mesh, sizes, exact_product, torch.bfloat16)
    assert root.dtype == (torch.bfloat16 if len(cuts) == 1 else torch.float32)
    assert same_bits(tree_sum(root, torch.bfloat16), tree_sum(separate, torch.bfloat16))
    across = contraction.nodes(a, b, VirtualMesh(2 * shards, 2, 0, graphs=True), sizes, exact_product, torch.bfloat16)
    assert same_bits(across, nodes), "a node of two ranks' tree stays in fp32"
    exact = a.double() @ b.double()
    torch.testing.assert_close(folded_nodes(nodes).double(), exact, rtol=1e-4, atol=1e-4)


def test_a_triton_that_does_not_compile_the_kernel_turns_it_off_and_says_so(kernel_stand_in, caplog):
    def removed(*_):
        raise TritonError("at 28:4:") from RuntimeError("async_copy_shared_to_global has been removed")

    launches = kernel_stand_in(removed)
    a, b, sizes = segmented_operands(2, 1)
    mesh = VirtualMesh(2, 1, 0, graphs=True)
    for _ in range(2):
        nodes = contraction.nodes(a, b, mesh, sizes, exact_product)
    assert same_bits(folded_nodes(nodes), folded_nodes(contraction._looped(a, b, mesh, sizes, exact_product)))
    assert len(launches) == 1
    (message,) = caplog.messages
    assert "segmented-K GEMM is off" in message
    assert message.endswith("async_copy_shared_to_global has been removed")


def test_a_triton_without_what_the_kernel_imports_turns_it_off(kernel_stand_in, caplog, monkeypatch):
    kernel_stand_in(kernel.in_order)
    monkeypatch.setitem(sys.modules, kernel.__name__, None)
    monkeypatch.delattr(sys.modules["tp_invariant_recipes.kernels.gemm"], "segmented_k_gemm")
    a, b, _ = segmented_operands(2, 1)
    assert contraction.in_one_launch(a, b, 2, (32,)) is None
    assert "lacks what its kernel imports" in caplog.text
    contraction._imports.cache_clear()


def test_a_cut_is_walked_in_the_order_of_the_tree():
    assert Cut(range(2, 4), 4, 1).slices(64) == [slice(32, 48), slice(48, 64)]
    # gate and up: a shard's term is the sum of one piece from each
    assert Cut(range(2, 4), 4, 2).slices(64) == [slice(16, 24), slice(48, 56), slice(24, 32), slice(56, 64)]


@pytest.mark.parametrize("shards, segments", ((1, 1), (2, 3), (2, 4)))
def test_what_one_launch_cannot_add_goes_one_by_one(kernel_stand_in, shards, segments):
    launches = kernel_stand_in(kernel.in_order)
    a, b, sizes = segmented_operands(shards, segments)
    if segments == 4:
        sizes = (*sizes[:2], sizes[2] - PIECE, sizes[3] + PIECE)  # segments of different sizes
    nodes = contraction.nodes(a, b, VirtualMesh(shards, 1, 0, graphs=True), sizes, exact_product)
    assert launches == []
    assert nodes.shape == (shards, 24, 20)


# Whether a run has CUDA graphs, how large a sum must be, and whether one launch makes it. The last is the least.
PAYS = ((False, None, False), (True, None, True), (False, 24 * 64 * 20, True), (False, 24 * 64 * 20 + 1, False))


@pytest.mark.parametrize("graphs, worth, at_once", PAYS)
def test_small_sums_go_one_by_one_unless_a_graph_launches_them(kernel_stand_in, monkeypatch, graphs, worth, at_once):
    launches = kernel_stand_in(kernel.in_order)
    if worth is not None:
        monkeypatch.setattr(contraction, "WORTH", worth)
    a, b, sizes = segmented_operands(4, 1)
    contraction.nodes(a, b, VirtualMesh(4, 1, 0, graphs=graphs), sizes, exact_product)
    assert bool(launches) == at_once


def without_borders(a, b, out, cut, add):
    fixed_tile_gemm(a, b, out, add=add)


def added_in_turn(a, b, out, cut, add):
    total = torch.zeros_like(out)
    for k in cut.slices(a.shape[1]):
        fixed_tile_gemm(a[:, k], b[k], total, add=True)
    out.copy_(out + total if add else total)


def at_another_border(a, b, out, cut, add):
    slices = cut.slices(a.shape[1])
    first, second = slices[0], slices[1]
    moved = [slice(first.start, first.stop + 4), slice(second.start + 4, second.stop), *slices[2:]]
    kernel.in_order(a, b, out, SimpleNamespace(slices=lambda k: moved), add)


WRONG = (without_borders, added_in_turn, at_another_border)


@pytest.mark.parametrize("shards, segments", LAUNCHES)
def test_a_batch_has_the_bits_of_one_by_one(batch_stand_in, shards, segments):
    launches = batch_stand_in(exact_batch)
    a, b, sizes = segmented_operands(shards, segments)
    mesh = VirtualMesh(shards, 1, 0)
    nodes = contraction.nodes(a, b, mesh, sizes, exact_product)
    assert list(contraction._batch_is_exact.values()) == [True] * (shards > 1)
    launches.clear()
    repeated = contraction.nodes(a, b, mesh, sizes, exact_product)
    assert launches == [(shards, 24, PIECE, 20, n > 0) for n in range(segments)] * (shards > 1)
    separate = contraction._looped(a, b, mesh, sizes, exact_product)
    assert same_bits(nodes, repeated)
    assert same_bits(folded_nodes(nodes), folded_nodes(separate))


def backwards(a, b, out, add):
    exact_batch(a.flip(2), b.flip(1), out, add)


def in_halves(a, b, out, add):
    half = a.shape[2] // 2
    exact_batch(a[:, :, half:], b[:, half:], out, add)
    exact_batch(a[:, :, :half], b[:, :half], out, True)


def term_in_halves(a, b, out, add):
    exact_batch(a, b, out, add)
    if not add:
        in_halves(a[2:3], b[2:3], out[2:3], add)


@pytest.mark.parametrize(
    "wrong, segments",
    (*((wrong, 1) for wrong in WRONG), *itertools.product((backwards, in_halves, term_in_halves), (1, 2))),
)
def test_a_wrong_sum_is_refused_and_changes_nothing(kernel_stand_in, batch_stand_in, monkeypatch, wrong, segments):
    """Of the kernel, and of a batch."""
    kernels = wrong in WRONG
    a, b, sizes = segmented_operands(4, segments)
    mesh = VirtualMesh(4, 1, 0, graphs=kernels)
    launches = (kernel_stand_in if kernels else batch_stand_in)(wrong)
    nodes = contraction.nodes(a, b, mesh, sizes, exact_product)
    known = "_restarting_is_exact" if kernels else "_batch_is_exact"
    assert launches
    assert list(getattr(contraction, known).values()) == [False]
    assert same_bits(nodes, contraction._looped(a, b, mesh, sizes, exact_product))
    # The control: without the trial, the same one gives other bits.
    monkeypatch.setattr(contraction, known, dict.fromkeys(getattr(contraction, known), True))
    assert not same_bits(folded_nodes(contraction.nodes(a, b, mesh, sizes, exact_product)), folded_nodes(nodes))


def test_a_large_batch_goes_one_by_one(batch_stand_in, monkeypatch):
    launches = batch_stand_in(exact_batch)
    a, b, sizes = segmented_operands(4, 1)
    for room, batches in ((4 * 24 * 20 - 1, False), (4 * 24 * 20, True)):
        monkeypatch.setattr(contraction, "ROOM", room)
        contraction.nodes(a, b, VirtualMesh(4, 1, 0), sizes, exact_product)
        assert bool(launches) == batches


@pytest.mark.parametrize("kernels", (True, False), ids=("kernel", "batch"))
def test_live_operands_are_checked_on_request(kernel_stand_in, batch_stand_in, monkeypatch, kernels):
    wrong, sound = (without_borders, kernel.in_order) if kernels else (backwards, exact_batch)

    def wrong_with_large_numbers(a, *rest):
        (wrong if a.abs().max() > 100 else sound)(a, *rest)

    (kernel_stand_in if kernels else batch_stand_in)(wrong_with_large_numbers)
    a, b, sizes = segmented_operands(8, 1)
    mesh = VirtualMesh(8, 1, 0, graphs=kernels)
    monkeypatch.setattr(cublas, "checking", lambda: True)
    contraction.nodes(a, b, mesh, sizes, exact_product)
    what = "the sum of 8 GEMMs in one launch" if kernels else "a batch of 8 GEMMs"
    with pytest.raises(RunError, match=rf"TPI_CHECK_PRODUCTS=1: {what} of \[24, 128\] and \[128, 20\] is not bitwise"):
        contraction.nodes(a * 1000, b, mesh, sizes, exact_product)
    monkeypatch.setattr(cublas, "checking", lambda: False)
    contraction.nodes(a * 1000, b, mesh, sizes, exact_product)  # the control: nobody asks


def matrix(rows, columns, *, transposed=False, dtype=torch.bfloat16, place=0, cuda=True):
    """What `suits` asks of a tensor of a GPU."""
    shape = torch.empty(columns, rows, device="meta").t() if transposed else torch.empty(rows, columns, device="meta")

    def like(tensor):
        return SimpleNamespace(
            shape=tensor.shape,
            dtype=dtype,
            is_cuda=cuda,
            stride=tensor.stride,
            data_ptr=lambda: place,
            get_device=lambda: 0,
            t=lambda: like(tensor.t()),
        )

    return like(shape)


def fp8_matrix(rows, k, blocks="tensor", *, cuda=True):
    scales = torch.empty(
        {"tensor": (), "1x128": (rows, -(-k // 128)), "128x128": (-(-rows // 128), -(-k // 128))}[blocks]
    )
    return Quantized(matrix(rows, k, dtype=E4M3, cuda=cuda), scales, blocks)


CUT = Cut(range(2), 2, 1)
UNSUITABLE = {
    "a piece that is no multiple of a step": (matrix(64, 96), matrix(96, 64), CUT),
    "on a CPU": (matrix(64, 128, cuda=False), matrix(128, 64), CUT),
    "fp32": (matrix(64, 128, dtype=torch.float32), matrix(128, 64, dtype=torch.float32), CUT),
    "columns in memory": (matrix(64, 128, transposed=True), matrix(128, 64), CUT),
    "an odd address": (matrix(64, 128, place=2), matrix(128, 64), CUT),
    "rows of 12 bytes": (matrix(64, 128), matrix(128, 6), CUT),
    "rows of an output of 8 bytes": (matrix(64, 128), matrix(128, 2, transposed=True), CUT),
    "one piece": (matrix(64, 128), matrix(128, 64), Cut(range(1), 1, 1)),
    "three segments": (matrix(64, 384), matrix(384, 64), Cut(range(1), 1, 3)),
    "four segments": (matrix(64, 256), matrix(256, 64), Cut(range(1), 1, 4)),
    "FP8 scales of columns": (fp8_matrix(64, 256, "1x128"), fp8_matrix(64, 256, "1x128"), CUT),
    "a piece of FP8 that is no block": (fp8_matrix(64, 128), fp8_matrix(64, 128), CUT),
    "rows of a bf16 output of 8 bytes": (fp8_matrix(64, 256), fp8_matrix(4, 256), CUT),
    "FP8 on a CPU": (fp8_matrix(64, 256, cuda=False), fp8_matrix(64, 256), CUT),
}


@pytest.mark.parametrize("why", UNSUITABLE)
def test_operands_that_the_kernel_does_not_take(monkeypatch, why):
    monkeypatch.setattr(kernel, "_capability", lambda device: (9, 0))
    assert not kernel.suits(*UNSUITABLE[why])


def test_operands_that_it_takes(monkeypatch):
    monkeypatch.setattr(kernel, "_capability", lambda device: (9, 0))
    taken = matrix(64, 128), matrix(128, 64), CUT
    assert kernel.suits(*taken)
    assert kernel.suits(matrix(64, 128), matrix(128, 64, transposed=True), CUT)
    assert kernel.suits(fp8_matrix(64, 256), fp8_matrix(64, 256), CUT)
    assert kernel.suits(fp8_matrix(64, 256, "1x128"), fp8_matrix(64, 256, "128x128"), CUT)
    monkeypatch.setattr(kernel, "_capability", lambda device: (10, 0))
    assert not kernel.suits(*taken)


# --- FP8 ---


def fp8_by_definition(a, b, out, add):
    fp8.on_cpu(a, b, out, add)


@pytest.fixture
def fp8_stand_in(kernel_stand_in, monkeypatch):
    monkeypatch.setattr(kernel.fp8_tiles, "gemm", fp8_by_definition)
    return kernel_stand_in


@pytest.mark.parametrize("kind", ("tensor", "128x128"))
@pytest.mark.parametrize("shards, segments", ((2, 1), (1, 2), (8, 2), (32, 1)))
def test_fp8_sums_of_a_rank_have_the_bits_of_one_by_one(fp8_stand_in, kind, shards, segments):
    """The root is rounded once, by the launch if one makes it, as the tree rounds it elsewhere."""
    sizes = (128 * shards,) * segments
    a, b = fp8_operands(kind, 3, 16, sum(sizes), (E4M3, E4M3))
    mesh = VirtualMesh(shards, 1, 0, graphs=True)
    launches = fp8_stand_in(kernel.in_order)
    root = fp8.nodes(a, b, mesh, sizes, torch.bfloat16)
    assert root.dtype == (torch.bfloat16 if shards * segments <= 16 else torch.float32)
    assert launches
    assert set(contraction._restarting_is_exact.values()) == {True}
    across = fp8.nodes(a, b, VirtualMesh(2 * shards, 2, 0, graphs=True), sizes, torch.bfloat16)
    assert across.dtype == torch.float32  # a node of two ranks' tree
    launches.clear()
    separate = fp8.looped(a, b, shards, sizes)
    assert launches == []
    assert same_bits(tree_sum(root, torch.bfloat16), tree_sum(separate, torch.bfloat16))
    assert same_bits(tree_sum(across), tree_sum(separate))


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ("tensor", "128x128"))
def test_a_wrong_fp8_kernel_is_refused(fp8_stand_in, kind, wrong):
    a, b = fp8_operands(kind, 3, 16, 512, (E5M2, E4M3))

    def compute(a, b, out, cut, add):
        if wrong is without_borders:
            fp8_by_definition(a, b, out, add)
            return
        first, second, *rest = [(k.start, k.stop - k.start) for k in cut.slices(512)]
        moved = (first[0], first[1] + 128), (second[0] + 128, second[1] - 128)
        for n, piece in enumerate((first, second, *rest) if wrong is added_in_turn else (*moved, *rest)):
            if piece[1]:
                fp8_by_definition(a.along_k(*piece), b.along_k(*piece), out, add or n > 0)

    launches = fp8_stand_in(compute)
    mesh = VirtualMesh(4 if wrong is added_in_turn else 2, 1, 0, graphs=True)
    nodes = fp8.nodes(a, b, mesh, (512,))
    assert launches
    assert list(contraction._restarting_is_exact.values()) == [False]
    assert same_bits(tree_sum(nodes), tree_sum(fp8.looped(a, b, mesh.shards, (512,))))
