# SPDX-License-Identifier: Apache-2.0
"""Causal attention of new rows to keys in a cache of blocks: the sums of portable/ieee/attention.py, row by row.

A sequence's table names its blocks in the order of positions: the key of position j lies in slot
table[j // size] · size + j % size. So keys are added in the order of positions, wherever they lie, and a row has the
bits that it has in a pass over its whole sequence: e, its lanes and e · v begin at position 0 and end at the row's own.

A span is up to ROWS consecutive rows of a sequence. On a GPU a program computes a span for the heads of one group:
a row's heads lie side by side in a tile of scores. On a CPU a span's keys are gathered, and attention.py does the rest.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.cpu import tensor_core_cpu
from tp_invariant_recipes.kernels.cpu.cpu_threads import by_parts
from tp_invariant_recipes.kernels.cpu.numba_loop import cpu_loop
from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.portable.ieee.attention import _of_powers_of_two, forward_loop
from tp_invariant_recipes.portable.ieee.attention_triton import (
    FORWARD_TILES,
    LANES,
    LEAST,
    Tiles,
    _products,
    exponential,
)
from tp_invariant_recipes.portable.ieee.math import ONE_FP32, ZERO, fold_columns, power_of_two
from tp_invariant_recipes.portable.shared_source import SMALL, UNFUSED, as_array

# Scores of a tile: of a span of one row, as in decoding, and of longer ones. None of it changes a bit.
SINGLE_ROW, ROWS = Tiles(16, LANES, 4, 3), Tiles(64, LANES, 4, 3)


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
    """Return the most rows of a span on a GPU. heads: of a group; longest: rows of the longest span."""
    return _tile(heads, longest).queries // heads


def _tile(heads: int, longest: int) -> Tiles:
    """Return a tile that has the heads of a group side by side."""
    tile = SINGLE_ROW if longest == 1 else ROWS
    return tile._replace(queries=max(tile.queries, power_of_two(heads)))


def cached_attention(query: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float) -> Tensor:
    """Return the attention of each row to its sequence's keys up to its own: [R, h, d] bf16; 0 or anything where no
    span is.

    query:  [R, h, d] bf16. keys, values: [slots, g, d] bf16, of one layer; those of the rows are there.
    scale:  of the scores, rounded to fp32.
    """
    out = torch.zeros_like(query)
    if query.is_cuda:
        cached_triton(query.contiguous(), keys, values, out, spans, _of_powers_of_two(scale))
        return out
    arrays = [as_array(x.contiguous()).view(np.uint16) for x in (query, keys, values, out)]
    numbers = spans.size, np.float32(_of_powers_of_two(scale)), np.int32(tensor_core_cpu.KEPT_BITS)
    arguments = (*arrays, as_array(spans.tables), as_array(spans.positions), *numbers)
    units = len(spans.tables) * keys.shape[1]
    by_parts(lambda i, j: _cached_loop(i, j, *arguments), units, pays=query.numel() * spans.longest > SMALL)
    return out


@cpu_loop
def _cached_loop(
    begin: int, end: int, query: Any, keys: Any, values: Any, out: Any, tables: Any, positions: Any, size: int,
    scale: Any, kept: Any,
) -> None:  # fmt: skip
    """Fill out for the units begin … end - 1: of each span, the heads of each group. All but numbers: bits of bf16."""
    groups, d = keys.shape[1:]
    heads = query.shape[1] // groups
    for unit in range(begin, end):
        table, group = tables[unit // groups], unit % groups
        first, count = table[0], table[1]
        if count == 0:
            continue
        last = positions[first] + count
        k, v = np.empty((1, last, d), np.uint16), np.empty((1, d, last), np.uint16)
        q, o = np.empty((1, heads, d, count), np.uint16), np.empty((1, heads, d, count), np.uint16)
        unread = np.empty((2, 1, heads, count), np.float32)
        for j in range(last):
            slot = table[2 + j // size] * size + j % size
            for c in range(d):
                k[0, j, c], v[0, c, j] = keys[slot, group, c], values[slot, group, c]
        for i in range(count):
            for head in range(heads):
                for c in range(d):
                    q[0, head, c, i] = query[first + i, group * heads + head, c]
        forward_loop(q, k, v, o, unread[0], unread[1], scale, kept)
        for i in range(count):
            for head in range(heads):
                for c in range(d):
                    out[first + i, group * heads + head, c] = o[0, head, c, i]


def cached_triton(query: Tensor, keys: Tensor, values: Tensor, out: Tensor, spans: Spans, scale: float) -> None:
    """Fill out, where spans are. All contiguous; Triton's interpreter takes CPU tensors. scale: as powers of two."""
    (_, h, d), groups = query.shape, keys.shape[1]
    tile = _tile(h // groups, spans.longest)
    grid = len(spans.tables) * groups, 1
    tensors = (query, keys, values, out, spans.tables, spans.positions)
    constants = (h, groups, d, features := max(LEAST, power_of_two(d)), spans.size, *tile[:2])
    stages = min(tile.stages, FORWARD_TILES[max(128, features)].stages)
    CACHED.launch(grid, tensors, (spans.tables.shape[1], scale), constants, tile.warps, stages)


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
def _rows_at(x, table, start, last, STEP: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
             SIZE: tl.constexpr, KEYS: tl.constexpr, RAGGED: tl.constexpr):  # fmt: skip
    """Return the keys or values of KEYS positions from `start`, a multiple of KEYS, on: [KEYS, FEATURES].

    RAGGED: zeros from position `last` on, whose blocks are not read. A tile within a block has one address, and offsets
    that leave the loop over tiles.
    """
    row, column = tl.arange(0, KEYS), tl.arange(0, FEATURES)
    inside = start + row < last
    if SIZE >= KEYS:
        block = tl.load(table + start // SIZE).to(tl.int64)
        at = x + (block * SIZE + start % SIZE) * STEP + (row[:, None] * STEP + column[None, :])
    else:
        if RAGGED:
            block = tl.load(table + (start + row) // SIZE, mask=inside, other=0).to(tl.int64)
        else:
            block = tl.load(table + (start + row) // SIZE).to(tl.int64)
        at = x + ((block * SIZE + (start + row) % SIZE) * STEP)[:, None] + column[None, :]
    if RAGGED:
        return tl.load(at, mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0)
    if WIDTH < FEATURES:
        return tl.load(at, mask=(column < WIDTH)[None, :], other=0.0)
    return tl.load(at)


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
    number = tl.arange(0, QUERIES)
    row = begin + number // EACH
    inside = number < count * EACH
    column = tl.arange(0, FEATURES)
    at = ((first + number // EACH).to(tl.int64) * HEADS + group * EACH + number % EACH) * WIDTH
    mask = inside[:, None] & (column < WIDTH)[None, :]
    q = tl.load(query + at[:, None] + column[None, :], mask=mask, other=0.0)
    diagonal = tl.minimum(begin + 1, last) // KEYS * KEYS
    most = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    for start in range(0, diagonal, KEYS):
        k = _rows_at(keys, table, start, last, STEP, WIDTH, FEATURES, SIZE, KEYS, False)
        most = tl.maximum(most, tl.max(_products(q, k), 1))
    for start in range(diagonal, last, KEYS):
        scores = _products(q, _rows_at(keys, table, start, last, STEP, WIDTH, FEATURES, SIZE, KEYS, True))
        seen = (start + tl.arange(0, KEYS))[None, :] <= row[:, None]
        most = tl.maximum(most, tl.max(tl.where(seen, scores, float("-inf")), 1))
    top = most * scale
    lanes = tl.zeros((QUERIES, KEYS), dtype=tl.float32)
    sums = tl.zeros((QUERIES, FEATURES), dtype=tl.float32)
    for start in range(0, diagonal, KEYS):
        k = _rows_at(keys, table, start, last, STEP, WIDTH, FEATURES, SIZE, KEYS, False)
        e = exponential(_products(q, k), scale, top[:, None])
        lanes += e
        v = _rows_at(values, table, start, last, STEP, WIDTH, FEATURES, SIZE, KEYS, False)
        sums = tl.dot(e.to(tl.bfloat16), v, sums)
    for start in range(diagonal, last, KEYS):
        k = _rows_at(keys, table, start, last, STEP, WIDTH, FEATURES, SIZE, KEYS, True)
        e = exponential(_products(q, k), scale, top[:, None])
        seen = (start + tl.arange(0, KEYS))[None, :] <= row[:, None]
        e = tl.where(seen, e, ZERO)
        lanes += e
        v = _rows_at(values, table, start, last, STEP, WIDTH, FEATURES, SIZE, KEYS, True)
        sums = tl.dot(e.to(tl.bfloat16), v, sums)
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
