# SPDX-License-Identifier: Apache-2.0
"""The kernel of kernels/gemm/segmented_k_gemm.py, in Gluon, Triton's language for explicit layouts.

One warp copies tiles of a and b to shared memory (TMA). Two groups of four warps multiply them (WGMMA), each half of
the rows of a tile of `out`. A group begins the next piece, or tile, before it adds up or writes; the last begins a step
that nobody reads. There are as many programs as processors. Each takes the next tile from a counter, so that one which
starts late, behind a collective, takes fewer. The kernel is for compute capability 9.0, and Triton's interpreter cannot
run it.
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

# A thread's registers in the second group and in the warp that copies. The first group gets the rest of 504, the 168 of
# the launch for three groups; a kernel that asked for more would wait for them for ever. Three sums take 192 of them.
SECOND_REGISTERS, COPYING_REGISTERS = gl.constexpr(240), gl.constexpr(24)
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
    SCALED: gl.constexpr, GROUP: gl.constexpr,
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
    if SCALED == UNSCALED:  # the step that begins after the last piece; nobody reads its product
        stage = count % STAGES
        mbarrier.wait(free.index(stage), count // STAGES & 1 ^ 1)
        mbarrier.arrive(full.index(stage))
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
def _step(total, count, pipe, use_acc, HALF: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Begin a step of bf16: it is added to `total`, or overwrites it."""
    a_steps, b_steps, full, _ = pipe
    ROWS: gl.constexpr = a_steps.shape[1] // 2
    stage = count % STAGES
    mbarrier.wait(full.index(stage), count // STAGES & 1)
    a = a_steps.index(stage).slice(HALF * ROWS, ROWS)
    b = b_steps.index(stage)
    if TRANSPOSED:
        b = b.permute((1, 0))
    return warpgroup_mma(a, b, total, use_acc=use_acc, is_async=True), count + 1


@gluon.jit
def _piece(
    zeros, going, count, pipe, AHEAD: gl.constexpr,
    HALF: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Return the product of a piece whose first step has begun; with AHEAD begin the next piece before this one ends.

    A stage is free once the product of the next one has begun.
    """
    free = pipe[3]
    for _ in range(1, STEPS):
        going, count = _step(going, count, pipe, True, HALF, STAGES, TRANSPOSED)
        going = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(going,)))
        mbarrier.arrive(free.index((count + STAGES - 2) % STAGES))
    last = free.index((count + STAGES - 1) % STAGES)
    if AHEAD:
        after, count = _step(zeros, count, pipe, False, HALF, STAGES, TRANSPOSED)
        total, after = warpgroup_mma_wait(num_outstanding=1, deps=(going, after))
        going = warpgroup_mma_init(after)
    else:
        total = warpgroup_mma_wait(num_outstanding=0, deps=(going,))
    mbarrier.arrive(last)
    return total, going, count


@gluon.jit
def _settled(total):
    """Return a sum that is computed here. The compiler would compute it where it is read, and keep registers for both
    its terms; or move it while tensor cores still add to it, for which the assembler makes each of their instructions
    wait.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", (total,), gl.float32, is_pure=False, pack=1)


@gluon.jit
def _fp8_piece(
    total, count, pipe, scales, rows, block,
    HALF: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """As `_piece`, by kernels/gemm/fp8_tiles.py: a step's accumulator begins with zeros and is added to `total`.

    scales: where those of the rows of a [ROWS, 1] and of b's tile begin, and from one block of k to the next; or of the
            tensors. rows: which exist; block: of k, the first.
    """
    zeros = total
    a_steps, b_steps, full, free = pipe
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
    zeros, going, count, first, pipe, scales, rows, start, segment, AHEAD: gl.constexpr,
    HALF: gl.constexpr, SEGMENTS: gl.constexpr, SIZE: gl.constexpr, TRANSPOSED: gl.constexpr, SCALED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Return the sum of the pieces `first` and `first` + 1. start: of piece 0 in k."""
    ROWS: gl.constexpr = zeros.shape[0]
    STEP: gl.constexpr = pipe[0].shape[2]
    STEPS: gl.constexpr = SIZE // STEP
    if SCALED == UNSCALED:
        first_half, going, count = _piece(zeros, going, count, pipe, True, HALF, STEPS, STAGES, TRANSPOSED)
        second_half, going, count = _piece(zeros, going, count, pipe, AHEAD, HALF, STEPS, STAGES, TRANSPOSED)
    else:
        block = (start + first // SEGMENTS * SIZE) // STEP
        first_half, count = _fp8_piece(zeros, count, pipe, scales, rows, block, HALF, ROWS, STEPS, STAGES, SCALED)
        block += segment // STEP if SEGMENTS == 2 else STEPS
        second_half, count = _fp8_piece(zeros, count, pipe, scales, rows, block, HALF, ROWS, STEPS, STAGES, SCALED)
    return first_half + second_half, going, count


@gluon.jit
def _four(
    zeros, going, count, first, pipe, scales, rows, start, segment, waiting,
    HALF: gl.constexpr, SEGMENTS: gl.constexpr, SIZE: gl.constexpr, TRANSPOSED: gl.constexpr, SCALED: gl.constexpr,
    STAGES: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Return the sum of four pieces from `first` on; of two where PIECES is 2."""
    total, going, count = _pair(
        zeros, going, count, first, pipe, scales, rows, start, segment, True,
        HALF, SEGMENTS, SIZE, TRANSPOSED, SCALED, STAGES,
    )  # fmt: skip
    total = _settled(total)
    if PIECES > 2:  # registers hold three sums when the last piece ends, so no piece begins before
        if SCALED != UNSCALED:  # a piece takes two sums itself
            tma.store_wait(0)  # the half before has left
            waiting.store(total)
        second_half, going, count = _pair(
            zeros, going, count, first + 2, pipe, scales, rows, start, segment, False,
            HALF, SEGMENTS, SIZE, TRANSPOSED, SCALED, STAGES,
        )  # fmt: skip
        if SCALED != UNSCALED:
            total = waiting.load(zeros.type.layout)
        total = _settled(total + second_half)
    return total, going, count


@gluon.jit
def _multiply(
    pipe, numbers, told, heard, out, out_at, waiting, scales, m, n, row_size, m_tiles, n_tiles, start, segment, spare,
    HALF: gl.constexpr, PIECES: gl.constexpr, SEGMENTS: gl.constexpr, SIZE: gl.constexpr, TRANSPOSED: gl.constexpr,
    SCALED: gl.constexpr, ADD: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Return the upper (HALF = 0) or lower half of tiles of `out`.

    waiting: shared memory for a sum of four pieces that waits, in FP8 of two, and for a half that leaves. spare: global
    memory of this program for sums that wait longer.
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
    leaving = waiting
    if waiting.dtype != out.dtype:
        leaving = waiting._reinterpret(out.dtype, [2, ROWS, TILE_N], out.layout).index(0)
    count = 0
    turn = 0
    tile = _take_tile(turn, numbers, told, heard)
    begun = zeros
    if SCALED == UNSCALED:
        begun, count = _step(zeros, count, pipe, False, HALF, STAGES, TRANSPOSED)
        begun = warpgroup_mma_wait(num_outstanding=0, deps=(begun,))
    while tile < m_tiles * n_tiles:
        i, j = _place(tile, m_tiles, n_tiles, GROUP)
        top = i * (2 * ROWS) + HALF * ROWS
        row = (top + gl.arange(0, ROWS, gl.SliceLayout(1, layout))).to(gl.int64)[:, None]
        sa, sb, sa_row, sa_k, sb_row, sb_k = scales
        if SCALED == OF_BLOCKS:
            sa += row * sa_row
            sb += j * sb_row
        of_tile = (sa, sb, sa_k, sb_k)
        going = warpgroup_mma_init(begun)
        total, going, count = _four(
            zeros, going, count, 0, pipe, of_tile, row < m, start, segment, waiting,
            HALF, SEGMENTS, SIZE, TRANSPOSED, SCALED, STAGES, PIECES,
        )  # fmt: skip
        for four in gl.static_range(1, PIECES // 4):  # by a tree over fours: 0 + 1, 2 + 3, their sum
            if SCALED == UNSCALED and four % 2 == 1:
                tma.store_wait(0)
                waiting.store(total)
            else:
                gl.store(mine if four % 2 == 1 else longer, total)
            if SCALED == UNSCALED:
                going, count = _step(zeros, count, pipe, False, HALF, STAGES, TRANSPOSED)
            total, going, count = _four(
                zeros, going, count, 4 * four, pipe, of_tile, row < m, start, segment, waiting,
                HALF, SEGMENTS, SIZE, TRANSPOSED, SCALED, STAGES, PIECES,
            )  # fmt: skip
            if SCALED == UNSCALED and four % 2 == 1:
                total = waiting.load(layout) + total
            elif four % 2 == 1:
                total = gl.load(mine) + total
            if four == 3:
                total = gl.load(longer) + total
            total = _settled(total)
        if ADD:
            column = (j * TILE_N + gl.arange(0, TILE_N, gl.SliceLayout(0, layout)))[None, :]
            total += gl.load(out_at + row * row_size + column, mask=(row < m) & (column < n), other=0.0)
        tma.store_wait(0)
        leaving.store(total.to(out.dtype))
        if PIECES > 2 and SCALED == UNSCALED:
            going, count = _step(zeros, count, pipe, False, HALF, STAGES, TRANSPOSED)
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [top, j * TILE_N], leaving)
        if SCALED == UNSCALED:
            begun = _settled(warpgroup_mma_wait(num_outstanding=0, deps=(going,)))  # it has long ended
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
    WITHOUT: gl.constexpr = 4 if SCALED == UNSCALED else 2  # pieces of which no sum waits here
    KEPT: gl.constexpr = gl.float32 if PIECES > WITHOUT else out.dtype
    kept: gl.constexpr = gl.NVMMASharedLayout.get_default_for(out.block_type.shape, KEPT)
    waiting = gl.allocate_shared_memory(KEPT, [2] + out.block_type.shape, kept)  # noqa: RUF005
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    pipe = (a_steps, b_steps, full, free)
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
                pipe, numbers, told, heard, out, out_at, waiting.index(0), scales, m, n, row_size, m_tiles, n_tiles,
                start, segment, spare, 0, PIECES, SEGMENTS, SIZE, TRANSPOSED, SCALED, ADD, STAGES, GROUP,
            )),
            (_multiply, (
                pipe, numbers, told, heard, out, out_at, waiting.index(1), scales, m, n, row_size, m_tiles, n_tiles,
                start, segment, spare, 1, PIECES, SEGMENTS, SIZE, TRANSPOSED, SCALED, ADD, STAGES, GROUP,
            )),
            (_copy, (
                a, b, a_steps, b_steps, full, free, numbers, told, heard, taken, m_tiles, n_tiles, start, segment,
                PIECES, SEGMENTS, SIZE, TRANSPOSED, STAGES, SCALED, GROUP,
            )),
        ],
        [4, 1],  # warps of the second group, and the one that copies
        [SECOND_REGISTERS, COPYING_REGISTERS],
    )  # fmt: skip
