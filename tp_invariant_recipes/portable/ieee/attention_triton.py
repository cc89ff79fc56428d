# SPDX-License-Identifier: Apache-2.0
"""The attention of portable/ieee/attention.py for GPUs, without atomics: the bits of its form for a CPU.

`tl.dot` on a tensor core is the sum of kernels/gemm/segmented_k_gemm.py, if the accumulator is its third argument
and the calls follow k in order. Four kernels, with tiles of QUERIES × KEYS scores:

    forward        a tile of queries of one head: once over the keys for `top`, once more for e, its lanes and e · v
    dq             a tile of queries of one head: the fold of dout_c out_c, `along`; then over the keys
    dk and dv      a tile of keys of one head: over the queries; writes the head's sums
    of a group     adds the sums of its heads in order

Scores are computed again where they are needed. Only tiles on the diagonal are masked: there, and beyond the end, e, p
and ds are zeros, which change no sum. That holds for finite operands: an infinity times such a zero would be NaN here,
where the form for a CPU leaves it out.

An H200 gave the bits of the form for a CPU (tests/gpu/kernels/test_kernels.py), and so does Triton's
interpreter.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.portable.ieee.math import ONE_FP32, ZERO, exp2, fold_columns, fp32_of_bf16, power_of_two
from tp_invariant_recipes.portable.shared_source import INTERPRETED, UNFUSED, elementwise, fma

LANES = 64  # of the sum of exponentials, and the keys of a tile of the forward pass; part of the definition
LEAST = 16  # features of a tile at least: a step of a tensor core
BLOCK = 1024  # numbers of a program that adds heads


class Tiles(NamedTuple):
    """Sizes of a kernel's tiles of scores, and how Triton compiles it; none of them changes a bit."""

    queries: int
    keys: int
    warps: int
    stages: int


# By the features of a tile: the first row that has as many. Of 5 to 12 choices each, the fastest with 128 features on
# an H200, at 2048, 4096 and 8192 positions. The forward pass has these keys while it looks for `top`, then LANES.
FORWARD_TILES = {128: Tiles(64, 128, 4, 3), 256: Tiles(64, 64, 4, 2)}
QUERY_TILES = {128: Tiles(128, 64, 8, 3), 256: Tiles(64, 64, 4, 2)}
KEY_TILES = {128: Tiles(64, 128, 8, 3), 256: Tiles(64, 64, 4, 2)}


def forward_triton(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, top: Tensor, inverse: Tensor, scale: float
) -> None:
    """Fill out [s, b, h, d] bf16, top and inverse [b · g, h / g, s] fp32.

    query: [s, b, h, d] bf16; key, value: [s, b, g, d]. All contiguous; Triton's interpreter takes CPU tensors.
    scale: of the scores as powers of two.
    """
    s, b, h, _ = query.shape
    tiles, constants = _tiles(FORWARD_TILES, query), _constants(query, key)
    grid, tensors = (triton.cdiv(s, tiles.queries) * b * h, 1), (query, key, value, out, top, inverse)
    FORWARD.launch(grid, tensors, (s, b, scale), (*constants, *tiles[:2], LANES), *tiles[2:])


def backward_triton(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, top: Tensor, inverse: Tensor, dq: Tensor,
    dk: Tensor, dv: Tensor, scale: float, scale_of_gradients: float,
) -> None:  # fmt: skip
    """Fill dq, dk and dv, of the shapes of query, key and value, bf16.

    gradient: of out; out, top, inverse: of `forward_triton`. All contiguous; Triton's interpreter takes CPU tensors.
    """
    s, b, h, d = query.shape
    groups, constants = key.shape[2], _constants(query, key)
    along, of_heads = top.new_empty(top.shape), top.new_empty(2, b * h, s, d)
    tensors, numbers = (gradient, query, key, value), (s, b, scale, scale_of_gradients)
    tiles = _tiles(QUERY_TILES, query)
    grid = triton.cdiv(s, tiles.queries) * b * h, 1
    out_of = (*tensors, out, top, inverse, along, dq)
    BACKWARD_QUERY.launch(grid, out_of, numbers, (*constants, *tiles[:2]), *tiles[2:])
    tiles = _tiles(KEY_TILES, query)
    grid = triton.cdiv(s, tiles.keys) * b * h, 1
    out_of = (*tensors, top, inverse, along, *of_heads)
    BACKWARD_KEY.launch(grid, out_of, numbers[:3], (*constants, *tiles[:2]), *tiles[2:])
    grid = triton.cdiv(s * d, BLOCK), b * groups
    SUM_OF_HEADS.launch(grid, (*of_heads, dk, dv), (s, b, scale_of_gradients), (h, groups, d, BLOCK))


def _tiles(table: dict[int, Tiles], query: Tensor) -> Tiles:
    return next(tiles for features, tiles in table.items() if query.shape[-1] <= features)


def _constants(query: Tensor, key: Tensor) -> tuple[int, ...]:
    """HEADS, GROUPS, WIDTH, FOLD, FEATURES."""
    h, d = query.shape[2:]
    fold = power_of_two(d)
    return h, key.shape[2], d, fold, max(LEAST, fold)


@elementwise
def exponential(score, scale, top):
    """e of a score; scale is c of portable/ieee/attention.py."""
    return exp2(fma(score, scale, -top))


@triton.jit
def _tile(x, start, step, size, ROWS: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
          RAGGED: tl.constexpr):  # fmt: skip
    """ROWS rows of a head from `start` on, `step` numbers apart: [ROWS, FEATURES], zeros beyond the end.

    RAGGED: whether rows may lie beyond the end. What lies within a tile has 32 bits and leaves a loop over tiles.
    """
    row, column = tl.arange(0, ROWS), tl.arange(0, FEATURES)
    at = x + step.to(tl.int64) * start + (row[:, None] * step + column[None, :])
    if RAGGED:
        return tl.load(at, mask=(start + row < size)[:, None] & (column < WIDTH)[None, :], other=0.0)
    if WIDTH < FEATURES:
        return tl.load(at, mask=(column < WIDTH)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def _store_tile(x, value, start, step, size, WIDTH: tl.constexpr):
    """x: where row `start` begins."""
    row, column = tl.arange(0, value.shape[0]), tl.arange(0, value.shape[1])
    at = x + (row[:, None] * step + column[None, :])
    tl.store(at, value, mask=(start + row < size)[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _head(batch, HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Of this program's head: its number; its first number in query and in key; the numbers between their rows.

    Programs start in the order of their numbers. All heads' longest tiles come first, so that none is left for the end.
    """
    unit = (tl.program_id(0) % (batch * HEADS)).to(tl.int64)
    of_key = (unit // HEADS * GROUPS + unit % HEADS // (HEADS // GROUPS)) * WIDTH
    return unit, unit * WIDTH, of_key, batch * (HEADS * WIDTH), batch * (GROUPS * WIDTH)


@triton.jit
def _first_query(batch, HEADS: tl.constexpr, QUERIES: tl.constexpr):
    """Of this program's tile of queries. The last tiles have the most keys: they start first."""
    return (tl.num_programs(0) - 1 - tl.program_id(0)) // (batch * HEADS) * QUERIES


@triton.jit
def _fp32(x):
    return fp32_of_bf16(x.to(tl.int16, bitcast=True).to(tl.int32))


@triton.jit
def _products(a, b):
    """[m, k] and [n, k] → [m, n], from an accumulator of zeros."""
    return tl.dot(a, tl.trans(b), tl.zeros((a.shape[0], b.shape[0]), dtype=tl.float32))


@triton.jit
def _largest(
    most, q, key, start, row, step, size,
    WIDTH: tl.constexpr, FEATURES: tl.constexpr, KEYS: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    scores = _products(q, _tile(key, start, step, size, KEYS, WIDTH, FEATURES, DIAGONAL))
    if DIAGONAL:
        column = start + tl.arange(0, KEYS)
        scores = tl.where(column[None, :] <= row[:, None], scores, float("-inf"))
    return tl.maximum(most, tl.max(scores, 1))


@triton.jit
def _added(
    lanes, sums, q, key, value, top, start, row, step, size, scale,
    WIDTH: tl.constexpr, FEATURES: tl.constexpr, KEYS: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    scores = _products(q, _tile(key, start, step, size, KEYS, WIDTH, FEATURES, DIAGONAL))
    e = exponential(scores, scale, top[:, None])
    if DIAGONAL:
        column = start + tl.arange(0, KEYS)
        e = tl.where(column[None, :] <= row[:, None], e, ZERO)
    v = _tile(value, start, step, size, KEYS, WIDTH, FEATURES, DIAGONAL)
    return lanes + e, tl.dot(e.to(tl.bfloat16), v, sums)


@triton.jit(do_not_specialize=["size", "batch", "scale"])
def _ieee_attention_forward(
    query, key, value, out, top, inverse, size, batch, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, FOLD: tl.constexpr, FEATURES: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    unit, of_query, of_key, step, step_of_key = _head(batch, HEADS, GROUPS, WIDTH)
    key, value = key + of_key, value + of_key
    begin = _first_query(batch, HEADS, QUERIES)
    row, last, diagonal = begin + tl.arange(0, QUERIES), tl.minimum(begin + QUERIES, size), begin // KEYS * KEYS
    q = _tile(query + of_query, begin, step, size, QUERIES, WIDTH, FEATURES, True)
    most = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    for start in range(0, diagonal, KEYS):
        most = _largest(most, q, key, start, row, step_of_key, size, WIDTH, FEATURES, KEYS, False)
    for start in range(diagonal, last, KEYS):
        most = _largest(most, q, key, start, row, step_of_key, size, WIDTH, FEATURES, KEYS, True)
    most = most * scale
    lanes = tl.zeros((QUERIES, LANES), dtype=tl.float32)
    sums = tl.zeros((QUERIES, FEATURES), dtype=tl.float32)
    diagonal = begin // LANES * LANES
    for start in range(0, diagonal, LANES):
        lanes, sums = _added(
            lanes, sums, q, key, value, most, start, row, step_of_key, size, scale, WIDTH, FEATURES, LANES, False
        )  # fmt: skip
    for start in range(diagonal, last, LANES):
        lanes, sums = _added(
            lanes, sums, q, key, value, most, start, row, step_of_key, size, scale, WIDTH, FEATURES, LANES, True
        )  # fmt: skip
    part = tl.div_rn(tl.full((QUERIES,), ONE_FP32, dtype=tl.float32), fold_columns(lanes, QUERIES, LANES))
    result = (sums * part[:, None]).to(tl.bfloat16)
    _store_tile(out + of_query + step.to(tl.int64) * begin, result, begin, step, size, WIDTH)
    at = unit * size + row
    tl.store(top + at, most, mask=row < size)
    tl.store(inverse + at, part, mask=row < size)


@triton.jit
def _added_to_query(
    sums, q, do, key, value, top, inverse, along, start, row, step, size, scale,
    WIDTH: tl.constexpr, FEATURES: tl.constexpr, KEYS: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    k = _tile(key, start, step, size, KEYS, WIDTH, FEATURES, DIAGONAL)
    v = _tile(value, start, step, size, KEYS, WIDTH, FEATURES, DIAGONAL)
    p = exponential(_products(q, k), scale, top[:, None]) * inverse[:, None]
    ds = (_products(do, v) - along[:, None]) * p
    if DIAGONAL:
        column = start + tl.arange(0, KEYS)
        ds = tl.where(column[None, :] <= row[:, None], ds, ZERO)
    return tl.dot(ds.to(tl.bfloat16), k, sums)


@triton.jit(do_not_specialize=["size", "batch", "scale", "scale_of_gradients"])
def _ieee_attention_backward_query(
    gradient, query, key, value, out, top, inverse, along, dq, size, batch, scale, scale_of_gradients,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, FOLD: tl.constexpr, FEATURES: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    unit, of_query, of_key, step, step_of_key = _head(batch, HEADS, GROUPS, WIDTH)
    key, value = key + of_key, value + of_key
    begin = _first_query(batch, HEADS, QUERIES)
    row, last, diagonal = begin + tl.arange(0, QUERIES), tl.minimum(begin + QUERIES, size), begin // KEYS * KEYS
    at = unit * size + row
    x = _tile(gradient + of_query, begin, step, size, QUERIES, WIDTH, FOLD, True)
    y = _tile(out + of_query, begin, step, size, QUERIES, WIDTH, FOLD, True)
    mine = fold_columns(_fp32(x) * _fp32(y), QUERIES, FOLD)
    tl.store(along + at, mine, mask=row < size)
    most = tl.load(top + at, mask=row < size, other=0.0)
    part = tl.load(inverse + at, mask=row < size, other=0.0)
    q = _tile(query + of_query, begin, step, size, QUERIES, WIDTH, FEATURES, True)
    do = _tile(gradient + of_query, begin, step, size, QUERIES, WIDTH, FEATURES, True)
    sums = tl.zeros((QUERIES, FEATURES), dtype=tl.float32)
    for start in range(0, diagonal, KEYS):
        sums = _added_to_query(
            sums, q, do, key, value, most, part, mine, start, row, step_of_key, size, scale,
            WIDTH, FEATURES, KEYS, False,
        )  # fmt: skip
    for start in range(diagonal, last, KEYS):
        sums = _added_to_query(
            sums, q, do, key, value, most, part, mine, start, row, step_of_key, size, scale,
            WIDTH, FEATURES, KEYS, True,
        )  # fmt: skip
    result = (sums * scale_of_gradients).to(tl.bfloat16)
    _store_tile(dq + of_query + step.to(tl.int64) * begin, result, begin, step, size, WIDTH)


@triton.jit
def _added_to_key(
    sums_k, sums_v, k, v, query, gradient, top, inverse, along, start, column, step, size, scale,
    WIDTH: tl.constexpr, FEATURES: tl.constexpr, QUERIES: tl.constexpr, DIAGONAL: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    q = _tile(query, start, step, size, QUERIES, WIDTH, FEATURES, RAGGED)
    do = _tile(gradient, start, step, size, QUERIES, WIDTH, FEATURES, RAGGED)
    row = start + tl.arange(0, QUERIES)
    p = exponential(_products(k, q), scale, _numbers(top, row, size, RAGGED)[None, :])
    p *= _numbers(inverse, row, size, RAGGED)[None, :]
    if DIAGONAL:
        p = tl.where(column[:, None] <= row[None, :], p, ZERO)
    ds = (_products(v, do) - _numbers(along, row, size, RAGGED)[None, :]) * p
    sums_k = tl.dot(ds.to(tl.bfloat16), q, sums_k)
    return sums_k, _finished(tl.dot(p.to(tl.bfloat16), do, sums_v))


@triton.jit
def _finished(sums):
    """No instruction, but a use of the sums: a Hopper waits for them here.

    Without it ptxas finds accumulators of the next products between these, and runs every product of the loop by
    itself (its warning C7515).
    """
    if INTERPRETED:
        return sums
    return tl.inline_asm_elementwise("", "=f,0", [sums], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _numbers(x, row, size, RAGGED: tl.constexpr):
    """One number a row, zeros beyond the end."""
    if RAGGED:
        return tl.load(x + row, mask=row < size, other=0.0)
    return tl.load(x + row)


@triton.jit(do_not_specialize=["size", "batch", "scale"])
def _ieee_attention_backward_key(
    gradient, query, key, value, top, inverse, along, dk, dv, size, batch, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, FOLD: tl.constexpr, FEATURES: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    unit, of_query, of_key, step, step_of_key = _head(batch, HEADS, GROUPS, WIDTH)
    query, gradient = query + of_query, gradient + of_query
    top, inverse, along = top + unit * size, inverse + unit * size, along + unit * size
    first = tl.program_id(0) // (batch * HEADS) * KEYS
    column = first + tl.arange(0, KEYS)
    k = _tile(key + of_key, first, step_of_key, size, KEYS, WIDTH, FEATURES, True)
    v = _tile(value + of_key, first, step_of_key, size, KEYS, WIDTH, FEATURES, True)
    sums_k = tl.zeros((KEYS, FEATURES), dtype=tl.float32)
    sums_v = tl.zeros((KEYS, FEATURES), dtype=tl.float32)
    # Earlier queries do not see these keys. Where a tile starts is a multiple of a tensor core's step.
    begin = first // QUERIES * QUERIES
    seen = tl.minimum((first + KEYS + QUERIES - 1) // QUERIES * QUERIES, size)  # from here on queries see all keys
    whole = tl.maximum(seen, size // QUERIES * QUERIES)
    for start in range(begin, seen, QUERIES):
        sums_k, sums_v = _added_to_key(
            sums_k, sums_v, k, v, query, gradient, top, inverse, along, start, column, step, size, scale,
            WIDTH, FEATURES, QUERIES, True, True,
        )  # fmt: skip
    for start in range(seen, whole, QUERIES):
        sums_k, sums_v = _added_to_key(
            sums_k, sums_v, k, v, query, gradient, top, inverse, along, start, column, step, size, scale,
            WIDTH, FEATURES, QUERIES, False, False,
        )  # fmt: skip
    for start in range(whole, size, QUERIES):
        sums_k, sums_v = _added_to_key(
            sums_k, sums_v, k, v, query, gradient, top, inverse, along, start, column, step, size, scale,
            WIDTH, FEATURES, QUERIES, False, True,
        )  # fmt: skip
    _store_tile(dk + (unit * size + first) * WIDTH, sums_k, first, WIDTH, size, WIDTH)
    _store_tile(dv + (unit * size + first) * WIDTH, sums_v, first, WIDTH, size, WIDTH)


@triton.jit(do_not_specialize=["size", "batch", "scale"])
def _ieee_attention_sum_of_heads(
    dk_of_heads, dv_of_heads, dk, dv, size, batch, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[b · h, s, d] fp32 → [s, b, g, d] bf16."""
    unit = tl.program_id(1).to(tl.int64)  # sample and group
    of_group: tl.constexpr = HEADS // GROUPS
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    of_head = tl.cast(size, tl.int64) * WIDTH
    inside = at < of_head
    first = unit * of_group * of_head + at
    sums_k = tl.load(dk_of_heads + first, mask=inside, other=0.0)
    sums_v = tl.load(dv_of_heads + first, mask=inside, other=0.0)
    for number in tl.static_range(1, of_group):
        sums_k += tl.load(dk_of_heads + first + number * of_head, mask=inside, other=0.0)
        sums_v += tl.load(dv_of_heads + first + number * of_head, mask=inside, other=0.0)
    place = (at // WIDTH).to(tl.int64) * batch * GROUPS * WIDTH + unit * WIDTH + at % WIDTH
    tl.store(dk + place, (sums_k * scale).to(tl.bfloat16), mask=inside)
    tl.store(dv + place, sums_v.to(tl.bfloat16), mask=inside)


FORWARD, BACKWARD_QUERY, BACKWARD_KEY, SUM_OF_HEADS = (
    Kernel(kernel, **UNFUSED)
    for kernel in (
        _ieee_attention_forward,
        _ieee_attention_backward_query,
        _ieee_attention_backward_key,
        _ieee_attention_sum_of_heads,
    )
)
