# SPDX-License-Identifier: Apache-2.0
"""The kernel of kernels/gemm/segmented_k_gemm.py, in Gluon, Triton's language for explicit layouts.

`tl.dot` leaves no room for sums in shared memory. One warp copies tiles of a and b there (TMA). Two groups of four
warps multiply them (WGMMA), each half of the rows of a tile of `out`: one adds up or writes while the other multiplies.
There are as many programs as processors. Each takes the next tile from a counter, so that one which starts late, behind
a collective, takes fewer. The kernel is for compute capability 9.0, and Triton's interpreter cannot run it.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

# A thread's registers in the second group and in the warp that copies. The first group gets 256: together at most 504,
# the 168 of the launch for three groups; a kernel that asked for more would wait for them for ever.
SECOND_REGISTERS, COPYING_REGISTERS = gl.constexpr(216), gl.constexpr(24)
# What operands' scales are: none, of bf16; FP8's, of whole tensors, or of 128 of k by one row of a and 128 of b.
UNSCALED, OF_TENSORS, OF_BLOCKS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.jit
def _place(tile, m_tiles, n_tiles, GROUP: gl.constexpr):
    of_group = GROUP * n_tiles
    start = tile // of_group * GROUP
    height = gl.minimum(m_tiles - start, GROUP)
    return start + tile % of_group % height, tile % of_group // height


@gluon.jit
def _copy(
    a, b, a_steps, b_steps, full, free, numbers, told, heard, taken, m_tiles, n_tiles, start, segment,
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
        _give_tile(tile, turn, numbers, told, heard)
        i, j = _place(tile, m_tiles, n_tiles, GROUP)
        for step in range(PIECES * SIZE // STEP):
            piece = step // (SIZE // STEP)
            k = start + piece % SEGMENTS * segment + piece // SEGMENTS * SIZE + step % (SIZE // STEP) * STEP
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
    _give_tile(tiles, turn, numbers, told, heard)  # the end


@gluon.jit
def _give_tile(tile, turn, numbers, told, heard):
    """Give the next tile to the two groups that multiply; at most two are given and not yet heard."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(heard.index(turn % 2), turn // 2 & 1 ^ 1)
    numbers.index(turn % 2).store(gl.full([1], tile, gl.int32, layout))
    mbarrier.arrive(told.index(turn % 2))


@gluon.jit
def _take_tile(turn, numbers, told, heard):
    """Return the next tile; their number or more at the end."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(told.index(turn % 2), turn // 2 & 1)
    tile = gl.max(numbers.index(turn % 2).load(layout), 0)
    mbarrier.arrive(heard.index(turn % 2))
    return tile


@gluon.jit
def _piece(
    total, count, a_steps, b_steps, full, free,
    HALF: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Return the product of a piece, which overwrites `total`.

    A stage is free once the product of the next one has begun.
    """
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
def _fp8_piece(
    total, count, a_steps, b_steps, full, free, scales, rows, block,
    HALF: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """As `_piece`, by kernels/gemm/fp8_tiles.py: a step's accumulator begins with zeros and is added to `total`.

    scales: where those of the rows of a [ROWS, 1] and of b's tile begin, and from one block of k to the next; or of the
            tensors. rows: which exist; block: of k, the first.
    """
    zeros = total
    sa, sb, sa_k, sb_k = scales
    for step in range(STEPS):
        stage = count % STAGES
        if SCALED == OF_BLOCKS:
            at = block + step
            scale = gl.load(sa + at * sa_k, mask=rows, other=0.0) * gl.load(sb + at * sb_k)
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        a = a_steps.index(stage).slice(HALF * ROWS, ROWS)
        b = b_steps.index(stage).permute((1, 0))
        p = warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)
        p = warpgroup_mma_wait(num_outstanding=0, deps=(p,))
        mbarrier.arrive(free.index(stage))
        if SCALED == OF_BLOCKS:
            total = gl.fma(p, gl.broadcast(scale, p)[0], total)
        else:
            total += p
        count += 1
    if SCALED == OF_TENSORS:
        total *= gl.load(sa) * gl.load(sb)
    return total, count


@gluon.jit
def _pair(
    zeros, count, first, a_steps, b_steps, full, free, scales, rows, start, segment,
    HALF: gl.constexpr, SEGMENTS: gl.constexpr, SIZE: gl.constexpr, TRANSPOSED: gl.constexpr, SCALED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Return the sum of the pieces `first` and `first` + 1. start: of piece 0 in k."""
    ROWS: gl.constexpr = zeros.shape[0]
    STEP: gl.constexpr = a_steps.shape[2]
    STEPS: gl.constexpr = SIZE // STEP
    if SCALED == UNSCALED:
        first_half, count = _piece(zeros, count, a_steps, b_steps, full, free, HALF, ROWS, STEPS, STAGES, TRANSPOSED)
        second_half, count = _piece(zeros, count, a_steps, b_steps, full, free, HALF, ROWS, STEPS, STAGES, TRANSPOSED)
    else:
        block = (start + first // SEGMENTS * SIZE) // STEP
        first_half, count = _fp8_piece(
            zeros, count, a_steps, b_steps, full, free, scales, rows, block, HALF, ROWS, STEPS, STAGES, SCALED
        )
        block += segment // STEP if SEGMENTS == 2 else STEPS
        second_half, count = _fp8_piece(
            zeros, count, a_steps, b_steps, full, free, scales, rows, block, HALF, ROWS, STEPS, STAGES, SCALED
        )
    return first_half + second_half, count


@gluon.jit
def _four(
    zeros, count, first, a_steps, b_steps, full, free, scales, rows, start, segment, waiting,
    HALF: gl.constexpr, SEGMENTS: gl.constexpr, SIZE: gl.constexpr, TRANSPOSED: gl.constexpr, SCALED: gl.constexpr,
    STAGES: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Return the sum of four pieces from `first` on; of two where PIECES is 2."""
    total, count = _pair(
        zeros, count, first, a_steps, b_steps, full, free, scales, rows, start, segment,
        HALF, SEGMENTS, SIZE, TRANSPOSED, SCALED, STAGES,
    )  # fmt: skip
    tma.store_wait(0)  # the half before has left
    if PIECES > 2:
        waiting.store(total)
        total, count = _pair(
            zeros, count, first + 2, a_steps, b_steps, full, free, scales, rows, start, segment,
            HALF, SEGMENTS, SIZE, TRANSPOSED, SCALED, STAGES,
        )  # fmt: skip
        total = waiting.load(zeros.type.layout) + total
    return total, count


@gluon.jit
def _multiply(
    a_steps, b_steps, full, free, numbers, told, heard, out, out_at, waiting, leaving, scales, m, n, row_size, m_tiles,
    n_tiles, start, segment, spare,
    HALF: gl.constexpr, PIECES: gl.constexpr, SEGMENTS: gl.constexpr, SIZE: gl.constexpr, TRANSPOSED: gl.constexpr,
    SCALED: gl.constexpr, ADD: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Return the upper (HALF = 0) or lower half of tiles of `out`.

    waiting: shared memory for a sum that waits; leaving: for a half that leaves, maybe the same. spare: global memory
    of this program for sums that wait longer.
    """
    ROWS: gl.constexpr = out.block_type.shape[0]
    TILE_N: gl.constexpr = out.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, TILE_N, 16 if SCALED == UNSCALED else 32]
    )
    zeros = gl.zeros((ROWS, TILE_N), gl.float32, layout)
    mine = spare + (gl.program_id(0) * 2 + HALF) * 2 * ROWS * TILE_N
    mine += gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None] * TILE_N
    mine += gl.arange(0, TILE_N, gl.SliceLayout(0, layout))[None, :]
    longer = mine + ROWS * TILE_N
    count = 0
    turn = 0
    tile = _take_tile(turn, numbers, told, heard)
    while tile < m_tiles * n_tiles:
        i, j = _place(tile, m_tiles, n_tiles, GROUP)
        top = i * (2 * ROWS) + HALF * ROWS
        row = (top + gl.arange(0, ROWS, gl.SliceLayout(1, layout))).to(gl.int64)[:, None]
        sa, sb, sa_row, sa_k, sb_row, sb_k = scales
        if SCALED == OF_BLOCKS:
            sa += row * sa_row
            sb += j * sb_row
        of_tile = (sa, sb, sa_k, sb_k)
        total, count = _four(
            zeros, count, 0, a_steps, b_steps, full, free, of_tile, row < m, start, segment, waiting,
            HALF, SEGMENTS, SIZE, TRANSPOSED, SCALED, STAGES, PIECES,
        )  # fmt: skip
        for four in gl.static_range(1, PIECES // 4):  # by a tree over fours: 0 + 1, 2 + 3, their sum
            gl.store(mine if four % 2 == 1 else longer, total)
            total, count = _four(
                zeros, count, 4 * four, a_steps, b_steps, full, free, of_tile, row < m, start, segment, waiting,
                HALF, SEGMENTS, SIZE, TRANSPOSED, SCALED, STAGES, PIECES,
            )  # fmt: skip
            if four % 2 == 1:
                total = gl.load(mine) + total
            if four == 3:
                total = gl.load(longer) + total
        if ADD:
            column = (j * TILE_N + gl.arange(0, TILE_N, gl.SliceLayout(0, layout)))[None, :]
            total += gl.load(out_at + row * row_size + column, mask=(row < m) & (column < n), other=0.0)
        leaving.store(total.to(out.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [top, j * TILE_N], leaving)
        turn += 1
        tile = _take_tile(turn, numbers, told, heard)
    tma.store_wait(0)


@gluon.jit
def _restarting_product(
    a, b, out, out_at, sa, sb, sa_row, sa_k, sb_row, sb_k, taken, m, n, row_size, start, segment, spare,
    PIECES: gl.constexpr, SEGMENTS: gl.constexpr, SIZE: gl.constexpr, TRANSPOSED: gl.constexpr, SCALED: gl.constexpr,
    ADD: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    scales = (sa, sb, sa_row, sa_k, sb_row, sb_k)  # UNSCALED: none is read
    a_steps = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)  # noqa: RUF005 -- Gluon's lists
    b_steps = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)  # noqa: RUF005
    leaving = gl.allocate_shared_memory(out.dtype, [2] + out.block_type.shape, out.layout)  # noqa: RUF005
    waiting = leaving
    if PIECES > 2 and out.dtype != gl.float32:
        sums: gl.constexpr = gl.NVMMASharedLayout.get_default_for(out.block_type.shape, gl.float32)
        waiting = gl.allocate_shared_memory(gl.float32, [2] + out.block_type.shape, sums)  # noqa: RUF005
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
    m_tiles = gl.cdiv(m, a.block_type.shape[0])
    n_tiles = gl.cdiv(n, out.block_type.shape[1])
    gl.warp_specialize(
        [
            (_multiply, (
                a_steps, b_steps, full, free, numbers, told, heard, out, out_at, waiting.index(0), leaving.index(0),
                scales, m, n, row_size, m_tiles, n_tiles, start, segment, spare, 0, PIECES, SEGMENTS, SIZE, TRANSPOSED,
                SCALED, ADD, STAGES, GROUP,
            )),
            (_multiply, (
                a_steps, b_steps, full, free, numbers, told, heard, out, out_at, waiting.index(1), leaving.index(1),
                scales, m, n, row_size, m_tiles, n_tiles, start, segment, spare, 1, PIECES, SEGMENTS, SIZE, TRANSPOSED,
                SCALED, ADD, STAGES, GROUP,
            )),
            (_copy, (
                a, b, a_steps, b_steps, full, free, numbers, told, heard, taken, m_tiles, n_tiles, start, segment,
                PIECES, SEGMENTS, SIZE, TRANSPOSED, STAGES, GROUP,
            )),
        ],
        [4, 1],  # warps of the second group, and the one that copies
        [SECOND_REGISTERS, COPYING_REGISTERS],
    )  # fmt: skip
