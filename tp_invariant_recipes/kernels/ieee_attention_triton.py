"""The attention of kernels/ieee_attention.py for GPUs, without atomics: the bits of its form for a CPU.

`tl.dot` on a tensor core is the sum of kernels/tensor_core_sum.py, if the accumulator is its third argument and the
calls follow k in order. Four kernels, with tiles of QUERIES × KEYS scores:

    forward        a tile of queries of one head: once over the keys for `top`, once more for e, its lanes and e · v
    dq             a tile of queries of one head: the fold of dout_c out_c, `along`; then over the keys
    dk and dv      a tile of keys of one head: over the queries; writes the head's sums
    of a group     adds the sums of its heads in order

Scores are computed again where they are needed. Only tiles on the diagonal are masked: there, and beyond the end, e, p
and ds are zeros, which change no sum. That holds for finite operands: an infinity times such a zero would be NaN here,
where the form for a CPU leaves it out.

An H200 gave the bits of the form for a CPU (tests/gpu/test_kernels_attention.py), and so does Triton's interpreter.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.ieee_math import ONE, ZERO, exp2, fp32_of_bf16
from tp_invariant_recipes.kernels.ieee_sums import fold_columns, power_of_two
from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.kernels.one_source import UNFUSED, fma

LANES = 64  # of the sum of exponentials, and the keys of a tile of the forward pass; part of the definition
LEAST = 16  # features of a tile at least: a step of a tensor core
BLOCK = 1024  # numbers of a program that adds heads


class Tiles(NamedTuple):
    """Sizes of a kernel's tiles of scores, and how Triton compiles it; none of them changes a bit."""

    queries: int
    keys: int
    warps: int
    stages: int


# By the features of a tile: the first row that has as many.
FORWARD_TILES = {64: Tiles(128, LANES, 8, 3), 128: Tiles(128, LANES, 8, 3), 256: Tiles(64, LANES, 4, 2)}
QUERY_TILES = {64: Tiles(128, 64, 8, 3), 128: Tiles(128, 64, 8, 2), 256: Tiles(64, 64, 4, 2)}
KEY_TILES = {64: Tiles(64, 128, 8, 3), 128: Tiles(64, 128, 8, 2), 256: Tiles(64, 64, 4, 2)}


def forward_triton(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, top: Tensor, inverse: Tensor, scale: float
) -> None:
    """Fill out [s, b, h, d] bf16, top and inverse [b · g, h / g, s] fp32.

    query: [s, b, h, d] bf16; key, value: [s, b, g, d]. All contiguous; Triton's interpreter takes CPU tensors.
    scale: of the scores as powers of two.
    """
    s, b, h, _ = query.shape
    tiles, constants = _tiles(FORWARD_TILES, query), _constants(query, key)
    grid, tensors = (triton.cdiv(s, tiles.queries), b * h), (query, key, value, out, top, inverse)
    FORWARD.launch(grid, tensors, (s, b, scale), (*constants, *tiles[:2]), *tiles[2:])


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
    grid = triton.cdiv(s, tiles.queries), b * h
    out_of = (*tensors, out, top, inverse, along, dq)
    BACKWARD_QUERY.launch(grid, out_of, numbers, (*constants, *tiles[:2]), *tiles[2:])
    tiles = _tiles(KEY_TILES, query)
    grid = triton.cdiv(s, tiles.keys), b * h
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


@triton.jit
def _tile(x, row, step, size, WIDTH: tl.constexpr, FEATURES: tl.constexpr):
    """Rows of a head or group, `step` numbers apart: [rows, FEATURES], zeros beyond the end."""
    column = tl.arange(0, FEATURES)
    inside = (row < size)[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + row.to(tl.int64)[:, None] * step + column[None, :], mask=inside, other=0.0)


@triton.jit
def _store_tile(x, value, row, step, size, WIDTH: tl.constexpr, FEATURES: tl.constexpr):
    column = tl.arange(0, FEATURES)
    inside = (row < size)[:, None] & (column < WIDTH)[None, :]
    tl.store(x + row.to(tl.int64)[:, None] * step + column[None, :], value, mask=inside)


@triton.jit
def _fp32(x):
    return fp32_of_bf16(x.to(tl.int16, bitcast=True).to(tl.int32))


@triton.jit
def _products(a, b):
    """[m, k] and [n, k] → [m, n], from an accumulator of zeros."""
    return tl.dot(a, tl.trans(b), tl.zeros((a.shape[0], b.shape[0]), dtype=tl.float32))


@triton.jit
def _largest(most, q, k_of, start, row, step, size, WIDTH: tl.constexpr, FEATURES: tl.constexpr, KEYS: tl.constexpr,
             MASKED: tl.constexpr):  # fmt: skip
    column = start + tl.arange(0, KEYS)
    scores = _products(q, _tile(k_of, column, step, size, WIDTH, FEATURES))
    if MASKED:
        scores = tl.where(column[None, :] <= row[:, None], scores, float("-inf"))
    return tl.maximum(most, tl.max(scores, 1))


@triton.jit
def _added(lanes, sums, q, k_of, v_of, top, start, row, step, size, scale, WIDTH: tl.constexpr,
           FEATURES: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    column = start + tl.arange(0, KEYS)
    scores = _products(q, _tile(k_of, column, step, size, WIDTH, FEATURES))
    e = exp2(fma(scores, scale, -top[:, None]))
    if MASKED:
        e = tl.where(column[None, :] <= row[:, None], e, ZERO)
    v = _tile(v_of, column, step, size, WIDTH, FEATURES)
    return lanes + e, tl.dot(e.to(tl.bfloat16), v, sums)


@triton.jit(do_not_specialize=["size", "batch", "scale"])
def _ieee_attention_forward(
    query, key, value, out, top, inverse, size, batch, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, FOLD: tl.constexpr, FEATURES: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1).to(tl.int64)
    sample, group = unit // HEADS, unit % HEADS // (HEADS // GROUPS)
    step, step_of_key = batch.to(tl.int64) * HEADS * WIDTH, batch.to(tl.int64) * GROUPS * WIDTH
    k_of, v_of = key + (sample * GROUPS + group) * WIDTH, value + (sample * GROUPS + group) * WIDTH
    # The last tiles have the most keys: they start first.
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    row, last = begin + tl.arange(0, QUERIES), tl.minimum(begin + QUERIES, size)
    diagonal = begin // KEYS * KEYS
    q = _tile(query + unit * WIDTH, row, step, size, WIDTH, FEATURES)
    most = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    for start in range(0, diagonal, KEYS):
        most = _largest(most, q, k_of, start, row, step_of_key, size, WIDTH, FEATURES, KEYS, False)
    for start in range(diagonal, last, KEYS):
        most = _largest(most, q, k_of, start, row, step_of_key, size, WIDTH, FEATURES, KEYS, True)
    most = most * scale
    lanes = tl.zeros((QUERIES, KEYS), dtype=tl.float32)
    sums = tl.zeros((QUERIES, FEATURES), dtype=tl.float32)
    for start in range(0, diagonal, KEYS):
        lanes, sums = _added(
            lanes, sums, q, k_of, v_of, most, start, row, step_of_key, size, scale, WIDTH, FEATURES, KEYS, False
        )
    for start in range(diagonal, last, KEYS):
        lanes, sums = _added(
            lanes, sums, q, k_of, v_of, most, start, row, step_of_key, size, scale, WIDTH, FEATURES, KEYS, True
        )
    part = tl.div_rn(tl.full((QUERIES,), ONE, dtype=tl.float32), fold_columns(lanes, QUERIES, KEYS))
    result = (sums * part[:, None]).to(tl.bfloat16)
    _store_tile(out + unit * WIDTH, result, row, step, size, WIDTH, FEATURES)
    at = unit * size + row
    tl.store(top + at, most, mask=row < size)
    tl.store(inverse + at, part, mask=row < size)


@triton.jit
def _added_to_query(sums, q, do, k_of, v_of, top, inverse, along, start, row, step, size, scale, WIDTH: tl.constexpr,
                    FEATURES: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    column = start + tl.arange(0, KEYS)
    k = _tile(k_of, column, step, size, WIDTH, FEATURES)
    v = _tile(v_of, column, step, size, WIDTH, FEATURES)
    p = exp2(fma(_products(q, k), scale, -top[:, None])) * inverse[:, None]
    ds = (_products(do, v) - along[:, None]) * p
    if MASKED:
        ds = tl.where(column[None, :] <= row[:, None], ds, ZERO)
    return tl.dot(ds.to(tl.bfloat16), k, sums)


@triton.jit(do_not_specialize=["size", "batch", "scale", "scale_of_gradients"])
def _ieee_attention_backward_query(
    gradient, query, key, value, out, top, inverse, along, dq, size, batch, scale, scale_of_gradients,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, FOLD: tl.constexpr, FEATURES: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1).to(tl.int64)
    sample, group = unit // HEADS, unit % HEADS // (HEADS // GROUPS)
    step, step_of_key = batch.to(tl.int64) * HEADS * WIDTH, batch.to(tl.int64) * GROUPS * WIDTH
    k_of, v_of = key + (sample * GROUPS + group) * WIDTH, value + (sample * GROUPS + group) * WIDTH
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    row, last = begin + tl.arange(0, QUERIES), tl.minimum(begin + QUERIES, size)
    diagonal = begin // KEYS * KEYS
    at = unit * size + row
    x = _tile(gradient + unit * WIDTH, row, step, size, WIDTH, FOLD)
    y = _tile(out + unit * WIDTH, row, step, size, WIDTH, FOLD)
    mine = fold_columns(_fp32(x) * _fp32(y), QUERIES, FOLD)
    tl.store(along + at, mine, mask=row < size)
    most = tl.load(top + at, mask=row < size, other=0.0)
    part = tl.load(inverse + at, mask=row < size, other=0.0)
    q = _tile(query + unit * WIDTH, row, step, size, WIDTH, FEATURES)
    do = _tile(gradient + unit * WIDTH, row, step, size, WIDTH, FEATURES)
    sums = tl.zeros((QUERIES, FEATURES), dtype=tl.float32)
    for start in range(0, diagonal, KEYS):
        sums = _added_to_query(
            sums, q, do, k_of, v_of, most, part, mine, start, row, step_of_key, size, scale, WIDTH, FEATURES, KEYS, False
        )  # fmt: skip
    for start in range(diagonal, last, KEYS):
        sums = _added_to_query(
            sums, q, do, k_of, v_of, most, part, mine, start, row, step_of_key, size, scale, WIDTH, FEATURES, KEYS, True
        )  # fmt: skip
    result = (sums * scale_of_gradients).to(tl.bfloat16)
    _store_tile(dq + unit * WIDTH, result, row, step, size, WIDTH, FEATURES)


@triton.jit
def _added_to_key(sums_k, sums_v, k, v, q_of, do_of, top_of, inverse_of, along_of, start, column, step, size, scale,
                  WIDTH: tl.constexpr, FEATURES: tl.constexpr, QUERIES: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    row = start + tl.arange(0, QUERIES)
    inside = row < size
    q = _tile(q_of, row, step, size, WIDTH, FEATURES)
    do = _tile(do_of, row, step, size, WIDTH, FEATURES)
    top = tl.load(top_of + row, mask=inside, other=0.0)
    inverse = tl.load(inverse_of + row, mask=inside, other=0.0)
    along = tl.load(along_of + row, mask=inside, other=0.0)
    p = exp2(fma(_products(k, q), scale, -top[None, :])) * inverse[None, :]
    if MASKED:
        p = tl.where(column[:, None] <= row[None, :], p, ZERO)
    ds = (_products(v, do) - along[None, :]) * p
    return tl.dot(ds.to(tl.bfloat16), q, sums_k), tl.dot(p.to(tl.bfloat16), do, sums_v)


@triton.jit(do_not_specialize=["size", "batch", "scale"])
def _ieee_attention_backward_key(
    gradient, query, key, value, top, inverse, along, dk, dv, size, batch, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, FOLD: tl.constexpr, FEATURES: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1).to(tl.int64)
    sample, group = unit // HEADS, unit % HEADS // (HEADS // GROUPS)
    step, step_of_key = batch.to(tl.int64) * HEADS * WIDTH, batch.to(tl.int64) * GROUPS * WIDTH
    k_of, v_of = key + (sample * GROUPS + group) * WIDTH, value + (sample * GROUPS + group) * WIDTH
    q_of, do_of = query + unit * WIDTH, gradient + unit * WIDTH
    first = tl.program_id(0) * KEYS
    column = first + tl.arange(0, KEYS)
    k = _tile(k_of, column, step_of_key, size, WIDTH, FEATURES)
    v = _tile(v_of, column, step_of_key, size, WIDTH, FEATURES)
    sums_k = tl.zeros((KEYS, FEATURES), dtype=tl.float32)
    sums_v = tl.zeros((KEYS, FEATURES), dtype=tl.float32)
    # Earlier queries do not see these keys. Where a tile starts is a multiple of a tensor core's step.
    begin = first // QUERIES * QUERIES
    seen = tl.minimum((first + KEYS + QUERIES - 1) // QUERIES * QUERIES, size)  # from here on queries see all keys
    top_of, inverse_of, along_of = top + unit * size, inverse + unit * size, along + unit * size
    for start in range(begin, seen, QUERIES):
        sums_k, sums_v = _added_to_key(
            sums_k, sums_v, k, v, q_of, do_of, top_of, inverse_of, along_of, start, column, step, size, scale, WIDTH,
            FEATURES, QUERIES, True,
        )  # fmt: skip
    for start in range(seen, size, QUERIES):
        sums_k, sums_v = _added_to_key(
            sums_k, sums_v, k, v, q_of, do_of, top_of, inverse_of, along_of, start, column, step, size, scale, WIDTH,
            FEATURES, QUERIES, False,
        )  # fmt: skip
    _store_tile(dk + unit * size * WIDTH, sums_k, column, WIDTH, size, WIDTH, FEATURES)
    _store_tile(dv + unit * size * WIDTH, sums_v, column, WIDTH, size, WIDTH, FEATURES)


@triton.jit(do_not_specialize=["size", "batch", "scale"])
def _ieee_attention_sum_of_heads(
    dk_of_heads, dv_of_heads, dk, dv, size, batch, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[b · h, s, d] fp32 → [s, b, g, d] bf16."""
    unit = tl.program_id(1).to(tl.int64)  # sample and group
    of_group: tl.constexpr = HEADS // GROUPS
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size * WIDTH
    first = unit * of_group * size * WIDTH + at
    sums_k = tl.load(dk_of_heads + first, mask=inside, other=0.0)
    sums_v = tl.load(dv_of_heads + first, mask=inside, other=0.0)
    for number in tl.static_range(1, of_group):
        sums_k += tl.load(dk_of_heads + first + number * size * WIDTH, mask=inside, other=0.0)
        sums_v += tl.load(dv_of_heads + first + number * size * WIDTH, mask=inside, other=0.0)
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
