"""Causal attention of new rows to keys in a cache of blocks: the sums of portable/ieee/attention.py, row by row.

A sequence's table names its blocks in the order of positions: the key of position j lies in slot
table[j // size] · size + j % size. So keys are added in the order of positions, wherever they lie, and a row has the
bits that it has in a pass over its whole sequence: e, its lanes and e · v begin at position 0 and end at the row's own.

A span is up to ROWS consecutive rows of a sequence. On a GPU a program computes a span for the heads of one group:
a row's heads lie side by side in a tile of scores. On a CPU a span's keys are gathered, and attention.py does the rest.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.portable.ieee.attention import _of_powers_of_two, attention_forward
from tp_invariant_recipes.portable.ieee.attention_triton import LANES, LEAST, Tiles, _products, exponential
from tp_invariant_recipes.portable.ieee.math import ONE_FP32, ZERO
from tp_invariant_recipes.portable.ieee.sums import fold_columns, power_of_two
from tp_invariant_recipes.portable.one_source import UNFUSED

# Scores of a tile: of a span of one row, as in decoding, and of longer ones. None of it changes a bit.
ONE_ROW, ROWS = Tiles(16, LANES, 4, 3), Tiles(64, LANES, 4, 2)


class Spans(NamedTuple):
    """Which rows attend to which keys.

    tables:    [n, 2 + blocks] int32: a span's first row, its number of rows (0: none), and its sequence's blocks.
    positions: [R] int64, of the rows.
    size:      tokens of a block, a power of two. longest: rows of the longest span.
    """

    tables: Tensor
    positions: Tensor
    size: int
    longest: int


def rows_of_tile(heads: int, longest: int) -> int:
    """The most rows of a span on a GPU. heads: of a group; longest: rows of the longest span."""
    return _sizes(heads, longest).queries // heads


def _sizes(heads: int, longest: int) -> Tiles:
    """A tile that has the heads of a group side by side."""
    tile = ONE_ROW if longest == 1 else ROWS
    return tile._replace(queries=max(tile.queries, power_of_two(heads)))


def cached_attention(query: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float) -> Tensor:
    """The attention of each row to its sequence's keys up to its own: [R, h, d] bf16; 0 or anything where no span is.

    query:  [R, h, d] bf16. keys, values: [slots, g, d] bf16, of one layer; those of the rows are there.
    scale:  of the scores, rounded to fp32.
    """
    out = torch.zeros_like(query)
    if query.is_cuda:
        cached_triton(query.contiguous(), keys, values, out, spans, _of_powers_of_two(scale))
        return out
    for table in spans.tables:
        first, count = table[:2].tolist()
        if count:
            at = torch.arange(int(spans.positions[first + count - 1]) + 1)
            slots = table[2:].long()[at // spans.size] * spans.size + at % spans.size
            rows = query[first : first + count].unsqueeze(1)
            of_span = keys[slots].unsqueeze(1), values[slots].unsqueeze(1)
            out[first : first + count] = attention_forward(rows, *of_span, scale).out.squeeze(1)
    return out


def cached_triton(query: Tensor, keys: Tensor, values: Tensor, out: Tensor, spans: Spans, scale: float) -> None:
    """Fill out, where spans are. All contiguous; Triton's interpreter takes CPU tensors. scale: as powers of two."""
    (_, h, d), groups = query.shape, keys.shape[1]
    tile = _sizes(h // groups, spans.longest)
    grid = len(spans.tables) * groups, 1
    tensors = (query, keys, values, out, spans.tables, spans.positions)
    constants = (h, groups, d, max(LEAST, power_of_two(d)), spans.size, *tile[:2])
    CACHED.launch(grid, tensors, (spans.tables.shape[1], scale), constants, *tile[2:])


def store_keys(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write rows of keys and values, [R, g, d], to their slots, int64 [R], of [slots, g, d]."""
    if key.is_cuda:
        store_triton(key.contiguous(), value.contiguous(), keys, values, slots)
    else:
        keys[slots], values[slots] = key, value


def store_triton(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """As `store_keys`. All contiguous; Triton's interpreter takes CPU tensors."""
    width = key.shape[1] * key.shape[2]
    STORE.launch((len(slots), 1), (key, value, keys, values, slots), (), (width, power_of_two(width)))


@triton.jit
def _tile(x, table, start, last, STEP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
          KEYS: tl.constexpr, RAGGED: tl.constexpr):  # fmt: skip
    """Keys or values of KEYS positions from `start` on: [KEYS, FEATURES]; RAGGED: zeros from position `last` on."""
    position, column = start + tl.arange(0, KEYS), tl.arange(0, FEATURES)
    inside = position < last
    if RAGGED:
        block = tl.load(table + position // SIZE, mask=inside, other=0)
    elif SIZE >= KEYS:
        block = tl.load(table + start // SIZE)
    else:
        block = tl.load(table + position // SIZE)
    at = x + (block.to(tl.int64) * SIZE + position % SIZE)[:, None] * STEP + column[None, :]
    if RAGGED:
        return tl.load(at, mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0)
    if WIDTH < FEATURES:
        return tl.load(at, mask=(column < WIDTH)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def _seen(start, row, KEYS: tl.constexpr):
    return (start + tl.arange(0, KEYS))[None, :] <= row[:, None]


@triton.jit
def _largest(
    most, q, keys, table, start, last, row,
    STEP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, KEYS: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    scores = _products(q, _tile(keys, table, start, last, STEP, SIZE, WIDTH, FEATURES, KEYS, RAGGED))
    if RAGGED:
        scores = tl.where(_seen(start, row, KEYS), scores, float("-inf"))
    return tl.maximum(most, tl.max(scores, 1))


@triton.jit
def _added(
    lanes, sums, q, keys, values, top, table, start, last, row, scale,
    STEP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, KEYS: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    scores = _products(q, _tile(keys, table, start, last, STEP, SIZE, WIDTH, FEATURES, KEYS, RAGGED))
    e = exponential(scores, scale, top[:, None])
    if RAGGED:
        e = tl.where(_seen(start, row, KEYS), e, ZERO)
    v = _tile(values, table, start, last, STEP, SIZE, WIDTH, FEATURES, KEYS, RAGGED)
    return lanes + e, tl.dot(e.to(tl.bfloat16), v, sums)


@triton.jit(do_not_specialize=["width", "scale"])
def _ieee_cached_attention(
    query, keys, values, out, tables, positions, width, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, SIZE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = HEADS // GROUPS
    STEP: tl.constexpr = GROUPS * WIDTH
    table, group = tables + tl.program_id(0) // GROUPS * width, tl.program_id(0) % GROUPS
    first, count, table = tl.load(table), tl.load(table + 1), table + 2
    begin = tl.load(positions + first).to(tl.int32)
    last = tl.where(count > 0, begin + count, 0)  # a program of no rows reads no keys
    keys, values = keys + group * WIDTH, values + group * WIDTH
    number, column = tl.arange(0, QUERIES), tl.arange(0, FEATURES)
    row = begin + number // EACH
    at = ((first + number // EACH).to(tl.int64) * HEADS + group * EACH + number % EACH) * WIDTH
    mask = (number < count * EACH)[:, None] & (column < WIDTH)[None, :]
    q = tl.load(query + at[:, None] + column[None, :], mask=mask, other=0.0)
    whole = tl.minimum(begin + 1, last) // KEYS * KEYS  # keys of tiles that every row sees
    most = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    for start in range(0, whole, KEYS):
        most = _largest(most, q, keys, table, start, last, row, STEP, SIZE, WIDTH, FEATURES, KEYS, False)
    for start in range(whole, last, KEYS):
        most = _largest(most, q, keys, table, start, last, row, STEP, SIZE, WIDTH, FEATURES, KEYS, True)
    most = most * scale
    lanes = tl.zeros((QUERIES, KEYS), dtype=tl.float32)
    sums = tl.zeros((QUERIES, FEATURES), dtype=tl.float32)
    for start in range(0, whole, KEYS):
        lanes, sums = _added(
            lanes, sums, q, keys, values, most, table, start, last, row, scale, STEP, SIZE, WIDTH, FEATURES, KEYS, False
        )  # fmt: skip
    for start in range(whole, last, KEYS):
        lanes, sums = _added(
            lanes, sums, q, keys, values, most, table, start, last, row, scale, STEP, SIZE, WIDTH, FEATURES, KEYS, True
        )  # fmt: skip
    part = tl.div_rn(tl.full((QUERIES,), ONE_FP32, dtype=tl.float32), fold_columns(lanes, QUERIES, KEYS))
    tl.store(out + at[:, None] + column[None, :], (sums * part[:, None]).to(tl.bfloat16), mask=mask)


@triton.jit
def _store_keys(key, value, keys, values, slots, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    slot = tl.load(slots + row)
    mask = column < WIDTH
    tl.store(keys + slot * WIDTH + column, tl.load(key + row * WIDTH + column, mask=mask), mask=mask)
    tl.store(values + slot * WIDTH + column, tl.load(value + row * WIDTH + column, mask=mask), mask=mask)


CACHED, STORE = Kernel(_ieee_cached_attention, **UNFUSED), Kernel(_store_keys, **UNFUSED)
