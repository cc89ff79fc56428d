"""The attention of kernels/ieee_attention.py for GPUs, without atomics: the bits of its form for a CPU.

`tl.dot` on a tensor core is the sum of kernels/tensor_core_sum.py, if the accumulator is its third argument and the
calls follow k in order. Four kernels, with tiles of QUERIES × LANES scores:

    forward        a tile of queries of one head: once over the keys for `top`, once more for e, its lanes and e · v
    dq             a tile of queries of one head: `along`, the fold of dout_c out_c; then over the keys
    dk and dv      a tile of keys of one group: over its heads in order, and in each over the queries in order

A tile of LANES keys is one round of the lanes. Scores are computed again where they are needed. Keys after a query,
and all beyond the end, are zeros in e, p and ds, which change no sum. That holds for finite operands: an infinity times
such a zero would be NaN here, where the form for a CPU leaves it out.

An H200 gave the bits of the form for a CPU (tests/gpu/test_kernels_attention.py), and so does Triton's interpreter.
"""

import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.ieee_math import MINUS_INFINITY, ZERO, bf16_bits, exp, fp32_of_bf16
from tp_invariant_recipes.kernels.ieee_sums import fold_columns, power_of_two
from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.kernels.one_source import UNFUSED

LANES = 64  # of the sum of exponentials, and the keys of a tile; part of the definition
QUERIES = 64  # of a tile; changes no bit
LEAST = 16  # features of a tile at least: a step of a tensor core
STAGES = 2  # of tiles on their way: with three, heads of 256 features do not fit the shared memory of an H200


def forward_triton(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, top: Tensor, total: Tensor, scale: float
) -> None:
    """Fill out [s, b, h, d] bf16, top and total [b · g, h / g, s] fp32.

    query: [s, b, h, d] bf16; key, value: [s, b, g, d]. All contiguous; Triton's interpreter takes CPU tensors.
    """
    s, b, h, _ = query.shape
    grid = triton.cdiv(s, QUERIES), b * h
    FORWARD.launch(grid, (query, key, value, out, top, total), (s, b, scale), _constants(query, key))


def backward_triton(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, top: Tensor, total: Tensor, dq: Tensor,
    dk: Tensor, dv: Tensor, scale: float,
) -> None:  # fmt: skip
    """Fill dq, dk and dv, of the shapes of query, key and value, bf16.

    gradient: of out; out, top, total: of `forward_triton`. All contiguous; Triton's interpreter takes CPU tensors.
    """
    s, b, h, _ = query.shape
    along, constants = top.new_empty(top.shape), _constants(query, key)
    tensors, numbers = (gradient, query, key, value), (s, b, scale)
    BACKWARD_QUERY.launch(
        (triton.cdiv(s, QUERIES), b * h), (*tensors, out, top, total, along, dq), numbers, constants
    )  # fmt: skip
    BACKWARD_KEY.launch(
        (triton.cdiv(s, LANES), b * key.shape[2]), (*tensors, top, total, along, dk, dv), numbers, constants
    )  # fmt: skip


def _constants(query: Tensor, key: Tensor) -> tuple[int, ...]:
    """HEADS, GROUPS, WIDTH, FOLD, FEATURES, QUERIES, LANES."""
    h, d = query.shape[2:]
    fold = power_of_two(d)
    return h, key.shape[2], d, fold, max(LEAST, fold), QUERIES, LANES


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
    tl.store(x + row.to(tl.int64)[:, None] * step + column[None, :], _bf16(value), mask=inside)


@triton.jit
def _bf16(x):
    """Rounded to nearest even."""
    return bf16_bits(x).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _fp32(x):
    return fp32_of_bf16(x.to(tl.int16, bitcast=True).to(tl.int32))


@triton.jit
def _products(a, b):
    """[m, k] and [n, k] → [m, n], from an accumulator of zeros."""
    return tl.dot(a, tl.trans(b), tl.zeros((a.shape[0], b.shape[0]), dtype=tl.float32))


@triton.jit(do_not_specialize=["size", "batch", "scale"])
def _ieee_attention_forward(
    query, key, value, out, top, total, size, batch, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, FOLD: tl.constexpr, FEATURES: tl.constexpr,
    QUERIES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1).to(tl.int64)
    sample, group = unit // HEADS, unit % HEADS // (HEADS // GROUPS)
    step, step_of_key = batch.to(tl.int64) * HEADS * WIDTH, batch.to(tl.int64) * GROUPS * WIDTH
    k_of, v_of = key + (sample * GROUPS + group) * WIDTH, value + (sample * GROUPS + group) * WIDTH
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    last = tl.minimum(tl.program_id(0) * QUERIES + QUERIES, size)
    q = _tile(query + unit * WIDTH, row, step, size, WIDTH, FEATURES)
    most = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    for start in range(0, last, LANES):
        column = start + tl.arange(0, LANES)
        scores = _products(q, _tile(k_of, column, step_of_key, size, WIDTH, FEATURES)) * scale
        scores = tl.where(column[None, :] <= row[:, None], scores, MINUS_INFINITY)
        most = tl.maximum(most, tl.max(scores, 1))
    lanes = tl.zeros((QUERIES, LANES), dtype=tl.float32)
    sums = tl.zeros((QUERIES, FEATURES), dtype=tl.float32)
    for start in range(0, last, LANES):
        column = start + tl.arange(0, LANES)
        scores = _products(q, _tile(k_of, column, step_of_key, size, WIDTH, FEATURES)) * scale
        e = tl.where(column[None, :] <= row[:, None], exp(scores - most[:, None]), ZERO)
        lanes += e
        sums = tl.dot(_bf16(e), _tile(v_of, column, step_of_key, size, WIDTH, FEATURES), sums)
    whole = fold_columns(lanes, QUERIES, LANES)
    result = tl.div_rn(sums, tl.broadcast_to(whole[:, None], (QUERIES, FEATURES)))
    _store_tile(out + unit * WIDTH, result, row, step, size, WIDTH, FEATURES)
    at = unit * size + row
    tl.store(top + at, most, mask=row < size)
    tl.store(total + at, whole, mask=row < size)


@triton.jit
def _shares(scores, visible, most, whole):
    """p of a tile of scores, +0 where a query does not see a key."""
    return tl.where(visible, tl.div_rn(exp(scores - most), whole), ZERO)


@triton.jit(do_not_specialize=["size", "batch", "scale"])
def _ieee_attention_backward_query(
    gradient, query, key, value, out, top, total, along, dq, size, batch, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, FOLD: tl.constexpr, FEATURES: tl.constexpr,
    QUERIES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1).to(tl.int64)
    sample, group = unit // HEADS, unit % HEADS // (HEADS // GROUPS)
    step, step_of_key = batch.to(tl.int64) * HEADS * WIDTH, batch.to(tl.int64) * GROUPS * WIDTH
    k_of, v_of = key + (sample * GROUPS + group) * WIDTH, value + (sample * GROUPS + group) * WIDTH
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    last = tl.minimum(tl.program_id(0) * QUERIES + QUERIES, size)
    at = unit * size + row
    x = _tile(gradient + unit * WIDTH, row, step, size, WIDTH, FOLD)
    y = _tile(out + unit * WIDTH, row, step, size, WIDTH, FOLD)
    mine = fold_columns(_fp32(x) * _fp32(y), QUERIES, FOLD)
    tl.store(along + at, mine, mask=row < size)
    most = tl.load(top + at, mask=row < size, other=0.0)
    whole = tl.broadcast_to(tl.load(total + at, mask=row < size, other=1.0)[:, None], (QUERIES, LANES))
    q = _tile(query + unit * WIDTH, row, step, size, WIDTH, FEATURES)
    do = _tile(gradient + unit * WIDTH, row, step, size, WIDTH, FEATURES)
    sums = tl.zeros((QUERIES, FEATURES), dtype=tl.float32)
    for start in range(0, last, LANES):
        column = start + tl.arange(0, LANES)
        k = _tile(k_of, column, step_of_key, size, WIDTH, FEATURES)
        v = _tile(v_of, column, step_of_key, size, WIDTH, FEATURES)
        visible = (column[None, :] <= row[:, None]) & (row < size)[:, None]
        p = _shares(_products(q, k) * scale, visible, most[:, None], whole)
        ds = ((_products(do, v) - mine[:, None]) * p) * scale
        sums = tl.dot(_bf16(tl.where(visible, ds, ZERO)), k, sums)
    _store_tile(dq + unit * WIDTH, sums, row, step, size, WIDTH, FEATURES)


@triton.jit(do_not_specialize=["size", "batch", "scale"])
def _ieee_attention_backward_key(
    gradient, query, key, value, top, total, along, dk, dv, size, batch, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, FOLD: tl.constexpr, FEATURES: tl.constexpr,
    QUERIES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1).to(tl.int64)  # sample and group
    of_group: tl.constexpr = HEADS // GROUPS
    step, step_of_key = batch.to(tl.int64) * HEADS * WIDTH, batch.to(tl.int64) * GROUPS * WIDTH
    column = tl.program_id(0) * LANES + tl.arange(0, LANES)
    k = _tile(key + unit * WIDTH, column, step_of_key, size, WIDTH, FEATURES)
    v = _tile(value + unit * WIDTH, column, step_of_key, size, WIDTH, FEATURES)
    sums_k = tl.zeros((LANES, FEATURES), dtype=tl.float32)
    sums_v = tl.zeros((LANES, FEATURES), dtype=tl.float32)
    # Earlier queries do not see these keys. Where a tile starts is a multiple of a tensor core's step.
    begin = tl.program_id(0) * LANES // QUERIES * QUERIES
    for number in range(of_group):
        head = unit * of_group + number
        for start in range(begin, size, QUERIES):
            row = start + tl.arange(0, QUERIES)
            inside = row < size
            at = head * size + row
            q = _tile(query + head * WIDTH, row, step, size, WIDTH, FEATURES)
            do = _tile(gradient + head * WIDTH, row, step, size, WIDTH, FEATURES)
            most = tl.load(top + at, mask=inside, other=0.0)[None, :]
            whole = tl.load(total + at, mask=inside, other=1.0)[None, :]
            mine = tl.load(along + at, mask=inside, other=0.0)[None, :]
            visible = (column[:, None] <= row[None, :]) & inside[None, :]
            p = _shares(_products(k, q) * scale, visible, most, tl.broadcast_to(whole, (LANES, QUERIES)))
            ds = ((_products(v, do) - mine) * p) * scale
            sums_v = tl.dot(_bf16(p), do, sums_v)
            sums_k = tl.dot(_bf16(tl.where(visible, ds, ZERO)), q, sums_k)
    _store_tile(dk + unit * WIDTH, sums_k, column, step_of_key, size, WIDTH, FEATURES)
    _store_tile(dv + unit * WIDTH, sums_v, column, step_of_key, size, WIDTH, FEATURES)


FORWARD, BACKWARD_QUERY, BACKWARD_KEY = (
    Kernel(kernel, num_stages=STAGES, **UNFUSED)
    for kernel in (_ieee_attention_forward, _ieee_attention_backward_query, _ieee_attention_backward_key)
)
