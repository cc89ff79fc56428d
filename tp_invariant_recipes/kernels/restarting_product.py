"""The sum of several shards in one launch: a product that restarts its accumulator at every border between them.

    out = (p0 + p1) + (p2 + p3),  p_i = a[:, piece i] @ b[piece i, :]

A tile of `out` walks k from the first piece to the last. At the end of a piece the accumulator is a term of the tree.
It waits in registers or in shared memory for its neighbour, and the next piece begins with zeros. So a tile of `out`
reaches memory once. Products of a library, one a piece, write all of `out`, and read and write it again for the next.

A piece has the bits of fixed tiles (kernels/fixed_tile_product.py): a tensor core adds along k in order. Between pieces
are IEEE additions in fp32. numerics/products/contraction.py tries both on the GPU at hand.

This is Gluon, Triton's language for explicit layouts, since `tl.dot` leaves no room for sums in shared memory. One warp
copies tiles of a and b there (TMA). Two groups of four warps multiply them (WGMMA), each half of the rows of a tile of
`out`: the one adds up or writes while the other multiplies. There are as many programs as processors. Each takes the
next tile from a counter, so that one which starts late, behind a collective, takes fewer. The kernel is for compute
capability 9.0, and Triton's interpreter cannot run it; `in_order` is the same function by other kernels.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tp_invariant_recipes.kernels.fixed_tile_product import fixed_tile_product

SEGMENTS = (1, 2)  # of three, the sum in order would not be the tree
PIECES = (2, 4)  # how many one launch can add: at most one term waits in registers and one in shared memory
TILE = 128  # rows and columns of a tile of `out`
STEP = 64  # of k, a step of the pipeline
ROWS = TILE // 2  # of a tile that one group of warps multiplies
STAGES = 5  # steps in shared memory: with the tile that waits or leaves, 224 of 227 KiB
GROUP = 8  # rows of tiles computed together, so that b's tiles stay in the cache
WARPS = 4  # of a group that multiplies
# A thread's registers in the second group and in the warp that copies. The first group gets 256: together at most 504,
# the 168 of the launch for three groups; a kernel that asked for more would wait for them for ever.
SECOND_REGISTERS, COPYING_REGISTERS = gl.constexpr(216), gl.constexpr(24)
COLUMNS = 4  # of `out`, a multiple of them: rows of 16 bytes


@dataclass(frozen=True)
class Cut:
    """The part of k that a launch sums.

    k consists of `segments` segments, each of `of` shards. A shard's term is the sum of its pieces, one a segment.
    shards: consecutive ones of the `of`. segments: 1 or 2.
    """

    shards: range
    of: int
    segments: int

    @property
    def pieces(self) -> int:
        """How many products the launch adds."""
        return len(self.shards) * self.segments

    def size(self, k: int) -> int:
        """Of a piece, where k is the whole."""
        return k // self.segments // self.of

    def slices(self, k: int) -> list[slice]:
        """The pieces of k, in the order of the tree."""
        size, segment = self.size(k), k // self.segments
        starts = [n * segment + shard * size for shard in self.shards for n in range(self.segments)]
        return [slice(start, start + size) for start in starts]


def suits(a: Tensor, b: Tensor, cut: Cut) -> bool:
    """Whether the kernel takes these operands, for an output without gaps."""
    return (
        cut.pieces in PIECES
        and cut.segments in SEGMENTS
        and cut.size(a.shape[1]) % STEP == 0
        and a.dtype == b.dtype == torch.bfloat16
        and a.is_cuda
        and _capability(a.get_device()) == (9, 0)
        and all(_rows_of_16_bytes(matrix) for matrix in (a, b if b.stride(1) == 1 else b.t()))
        and b.shape[1] % COLUMNS == 0
    )


def restarting_product(a: Tensor, b: Tensor, out: Tensor, cut: Cut, add: bool) -> None:
    """out = the tree sum of a[:, piece] @ b[piece, :] over the pieces of a cut, or out += that sum, added in fp32.

    a: [m, k] bf16; b: [k, n] bf16, which `suits` takes; out: [m, n] fp32 without gaps.
    """
    (m, n), transposed = out.shape, b.stride(1) != 1
    size, tiles = cut.size(a.shape[1]), triton.cdiv(m, TILE) * triton.cdiv(n, TILE)
    taken = torch.zeros(1, dtype=torch.int32, device=out.device)
    descriptors = (
        TensorDescriptor.from_tensor(a, [TILE, STEP], _layout(TILE, STEP, gl.bfloat16)),
        TensorDescriptor.from_tensor(b.t(), [TILE, STEP], _layout(TILE, STEP, gl.bfloat16))
        if transposed
        else TensorDescriptor.from_tensor(b, [STEP, TILE], _layout(STEP, TILE, gl.bfloat16)),
        TensorDescriptor.from_tensor(out, [ROWS, TILE], _layout(ROWS, TILE, gl.float32)),
    )
    _restarting_product[(min(tiles, _processors(out.get_device())),)](
        *descriptors, out, taken, m, n, out.stride(0), cut.shards.start * size, a.shape[1] // cut.segments,
        PIECES=cut.pieces, SEGMENTS=cut.segments, SIZE=size, TRANSPOSED=transposed, ADD=add,
        STAGES=STAGES, GROUP=GROUP, num_warps=WARPS,
    )  # fmt: skip


def in_order(a: Tensor, b: Tensor, out: Tensor, cut: Cut, add: bool) -> None:
    """The restarting product, from one product of fixed tiles for each piece: any operands, on a CPU too."""
    slices = cut.slices(a.shape[1])
    pairs = [torch.empty_like(out) for _ in slices[::2]]
    for n, k in enumerate(slices):  # adding to the output rounds as a separate addition would
        fixed_tile_product(a[:, k], b[k], pairs[n // 2], add=n % 2 > 0)
    total = pairs[0] if len(pairs) == 1 else pairs[0] + pairs[1]
    out.copy_(out + total if add else total)


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _layout(rows: int, columns: int, dtype: gl.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


def _rows_of_16_bytes(matrix: Tensor) -> bool:
    """Whether TMA can copy tiles of a bf16 matrix."""
    return matrix.stride(1) == 1 and matrix.data_ptr() % 16 == 0 and matrix.stride(0) % 8 == 0


@gluon.jit
def _place(tile, m_tiles, n_tiles, GROUP: gl.constexpr):
    """Row and column of a tile among the tiles of `out`."""
    of_group = GROUP * n_tiles
    start = tile // of_group * GROUP
    height = gl.minimum(m_tiles - start, GROUP)
    return start + tile % of_group % height, tile % of_group // height


@gluon.jit
def _copy(
    a, b, a_steps, b_steps, full, free, numbers, told, heard, taken, m_tiles, n_tiles, first, segment,
    PIECES: gl.constexpr, SEGMENTS: gl.constexpr, SIZE: gl.constexpr, TRANSPOSED: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Take tiles and tell their numbers; fill the stages, in the order in which `_multiply` empties them."""
    TILE_M: gl.constexpr = a.block_type.shape[0]
    TILE_N: gl.constexpr = b.block_type.shape[0] if TRANSPOSED else b.block_type.shape[1]
    STEP: gl.constexpr = a.block_type.shape[1]
    tiles = m_tiles * n_tiles
    count = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        _tell(tile, turn, numbers, told, heard)
        i, j = _place(tile, m_tiles, n_tiles, GROUP)
        for step in range(PIECES * SIZE // STEP):
            piece = step // (SIZE // STEP)
            k = first + piece % SEGMENTS * segment + piece // SEGMENTS * SIZE + step % (SIZE // STEP) * STEP
            stage = count % STAGES
            mbarrier.wait(free.index(stage), count // STAGES & 1 ^ 1)
            there = full.index(stage)
            mbarrier.expect(there, a.block_type.nbytes + b.block_type.nbytes)
            tma.async_copy_global_to_shared(a, [i * TILE_M, k], there, a_steps.index(stage))
            if TRANSPOSED:
                tma.async_copy_global_to_shared(b, [j * TILE_N, k], there, b_steps.index(stage))
            else:
                tma.async_copy_global_to_shared(b, [k, j * TILE_N], there, b_steps.index(stage))
            count += 1
        tile = gl.num_programs(0) + gl.atomic_add(taken, 1, sem="relaxed")
        turn += 1
    _tell(tiles, turn, numbers, told, heard)  # the end


@gluon.jit
def _tell(tile, turn, numbers, told, heard):
    """Give the next tile to the two groups that multiply; at most two are given and not yet heard."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(heard.index(turn % 2), turn // 2 & 1 ^ 1)
    numbers.index(turn % 2).store(gl.full([1], tile, gl.int32, one))
    mbarrier.arrive(told.index(turn % 2))


@gluon.jit
def _hear(turn, numbers, told, heard):
    """The next tile; their number or more at the end."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(told.index(turn % 2), turn // 2 & 1)
    tile = gl.max(numbers.index(turn % 2).load(one), 0)
    mbarrier.arrive(heard.index(turn % 2))
    return tile


@gluon.jit
def _piece(
    total, count, a_steps, b_steps, full, free,
    HALF: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """The product of a piece, which overwrites `total`. A stage is free once the product of the next one has begun."""
    total = warpgroup_mma_init(total)
    for step in range(STEPS):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        a = a_steps.index(stage).slice(HALF * ROWS, ROWS)
        b = b_steps.index(stage)
        if TRANSPOSED:
            b = b.permute((1, 0))
        total = warpgroup_mma(a, b, total, use_acc=step > 0, is_async=True)
        total = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(total,)))
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=step > 0)
        count += 1
    total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
    mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
    return total, count


@gluon.jit
def _multiply(
    a_steps, b_steps, full, free, numbers, told, heard, out, out_at, waiting, m, n, row_size, m_tiles, n_tiles,
    HALF: gl.constexpr, PIECES: gl.constexpr, STEPS: gl.constexpr, TRANSPOSED: gl.constexpr, ADD: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The upper (HALF = 0) or lower half of tiles of `out`.

    waiting: shared memory, in turn for the sum of the first two of four pieces, and for a half that leaves.
    """
    ROWS: gl.constexpr = out.block_type.shape[0]
    TILE_N: gl.constexpr = out.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, TILE_N, 16]
    )
    zeros = gl.zeros((ROWS, TILE_N), gl.float32, layout)
    count = 0
    turn = 0
    tile = _hear(turn, numbers, told, heard)
    while tile < m_tiles * n_tiles:
        i, j = _place(tile, m_tiles, n_tiles, GROUP)
        left, count = _piece(zeros, count, a_steps, b_steps, full, free, HALF, ROWS, STEPS, STAGES, TRANSPOSED)
        right, count = _piece(zeros, count, a_steps, b_steps, full, free, HALF, ROWS, STEPS, STAGES, TRANSPOSED)
        total = left + right
        tma.store_wait(0)  # the half before has left
        if PIECES == 4:
            waiting.store(total)
            left, count = _piece(zeros, count, a_steps, b_steps, full, free, HALF, ROWS, STEPS, STAGES, TRANSPOSED)
            right, count = _piece(zeros, count, a_steps, b_steps, full, free, HALF, ROWS, STEPS, STAGES, TRANSPOSED)
            total = waiting.load(layout) + (left + right)
        top = i * (2 * ROWS) + HALF * ROWS
        if ADD:
            row = (top + gl.arange(0, ROWS, gl.SliceLayout(1, layout))).to(gl.int64)[:, None]
            column = (j * TILE_N + gl.arange(0, TILE_N, gl.SliceLayout(0, layout)))[None, :]
            total += gl.load(out_at + row * row_size + column, mask=(row < m) & (column < n), other=0.0)
        waiting.store(total)
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [top, j * TILE_N], waiting)
        turn += 1
        tile = _hear(turn, numbers, told, heard)
    tma.store_wait(0)


@gluon.jit
def _restarting_product(
    a, b, out, out_at, taken, m, n, row_size, first, segment,
    PIECES: gl.constexpr, SEGMENTS: gl.constexpr, SIZE: gl.constexpr, TRANSPOSED: gl.constexpr, ADD: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    a_steps = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)  # noqa: RUF005 -- Gluon's lists
    b_steps = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)  # noqa: RUF005
    upper = gl.allocate_shared_memory(gl.float32, out.block_type.shape, out.layout)
    lower = gl.allocate_shared_memory(gl.float32, out.block_type.shape, out.layout)
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)  # both halves
    for turn in gl.static_range(2):
        mbarrier.init(told.index(turn), count=1)
        mbarrier.init(heard.index(turn), count=2)
    fence_async_shared()  # so that copies see the barriers
    STEPS: gl.constexpr = SIZE // a.block_type.shape[1]
    m_tiles = gl.cdiv(m, a.block_type.shape[0])
    n_tiles = gl.cdiv(n, out.block_type.shape[1])
    gl.warp_specialize(
        [
            (_multiply, (
                a_steps, b_steps, full, free, numbers, told, heard, out, out_at, upper, m, n, row_size, m_tiles,
                n_tiles, 0, PIECES, STEPS, TRANSPOSED, ADD, STAGES, GROUP,
            )),
            (_multiply, (
                a_steps, b_steps, full, free, numbers, told, heard, out, out_at, lower, m, n, row_size, m_tiles,
                n_tiles, 1, PIECES, STEPS, TRANSPOSED, ADD, STAGES, GROUP,
            )),
            (_copy, (
                a, b, a_steps, b_steps, full, free, numbers, told, heard, taken, m_tiles, n_tiles, first, segment,
                PIECES, SEGMENTS, SIZE, TRANSPOSED, STAGES, GROUP,
            )),
        ],
        [4, 1],  # warps of the second group, and the one that copies
        [SECOND_REGISTERS, COPYING_REGISTERS],
    )  # fmt: skip
