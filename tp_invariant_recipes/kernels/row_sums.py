# SPDX-License-Identifier: Apache-2.0
"""Sums of rows in a given order, on a GPU and with the same bits on a CPU.

centred_rows   rows less their mean: what LayerNorm does before an RMSNorm, and what its backward pass does last
folding_sum    a sum over one dimension that halves it until one number is left
row_sum        a few rows each: the experts' outputs for a token, or the gradients of its top-k assignments
token_sum      over tokens, feature by feature, in an order that is independent of the number of features
add_rows       rows added to chosen rows: the gradient of a table that a batch of ids was looked up in

Each row's bits depend only on the rows that are added to it.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from tp_invariant_recipes.kernels.launch import Kernel

LEAVES = 64  # at most, of a shard: enough programs to fill a GPU when a rank has one or two shards


def leaves_of(rows: int, least: int = 1) -> int:
    """How many equal leaves the rows of a shard are cut into: the largest power of two that leaves `least` in each."""
    leaves = 1
    while leaves < LEAVES and rows % (2 * leaves) == 0 and rows // (2 * leaves) >= least:
        leaves *= 2
    return leaves


def folding_sum(values: Tensor, dim: int) -> Tensor:
    """Sum `values` over dimension `dim`: add the upper half to the lower half until one is left.

    values:  […, n, …] fp32; for odd n the middle element waits for the next round.
             It may overwrite them.
    returns: […, …], perhaps a view. The order of the additions depends only on n. There are log2(n) launches.
    """
    n = values.shape[dim]
    if not values.is_cuda:
        return torch.from_numpy(fold(values.numpy(), dim))
    while n > 1:
        half = (n + 1) // 2
        values, upper = values.chunk(2, dim)
        (values if n % 2 == 0 else values.narrow(dim, 0, n - half)).add_(upper)
        n = half
    return values.select(dim, 0)


NARROW = 64  # columns: of fewer, NumPy spends its time on rows and not on numbers


def fold(values: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    """As `folding_sum`, of an array, by NumPy, whose calls take the host half as long as torch's."""
    axis %= values.ndim
    n = values.shape[axis]
    if axis == values.ndim - 1:
        if n & (n - 1):
            values, axis = np.ascontiguousarray(np.moveaxis(values, axis, 0)), 0
        else:
            return _fold_columns(np.ascontiguousarray(values))
    before: tuple[Any, ...] = (slice(None),) * axis
    while n > 1:
        half, odd = (n + 1) // 2, n % 2
        upper = values[*before, half:n]
        if odd:
            values[*before, : n - half] += upper
        values = values[*before, :half] if odd else values[*before, :half] + upper  # in place NumPy would copy them
        n = half
    return values[*before, 0]


def _fold_columns(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """[…, n] without gaps, n a power of two → […]."""
    n = values.shape[-1]
    while n > NARROW:
        n //= 2
        values = values[..., :n] + values[..., n:]
    flat, width = values.reshape(-1), n
    with np.errstate(over="ignore", invalid="ignore"):
        while n > 1:  # also adds across the borders of rows, numbers that are left out
            n //= 2
            flat = flat[:-n] + flat[n:]
    return flat[::width].copy().reshape(values.shape[:-1])


TILE = 4096  # elements of x that a program holds


def centred_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x - mean(x) over the last dimension, in fp32, rounded once. x: [rows, d]; returns: [rows, d] of `dtype`."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    return _centred_triton(x, out) if x.is_cuda else _centred_torch(x, out)


def _centred_torch(x: Tensor, out: Tensor) -> Tensor:
    mean = folding_sum(x.float().clone(), -1) * (1.0 / x.shape[1])
    return out.copy_(x.float() - mean.unsqueeze(1))


def _centred_triton(x: Tensor, out: Tensor) -> Tensor:
    rows, width = x.shape
    columns = triton.next_power_of_2(width)
    tile = max(1, TILE // columns)
    x = x.clone() if x.data_ptr() % 16 else x  # another alignment could be another order of additions
    constants = width, columns, tile
    CENTRED_ROWS.launch((triton.cdiv(rows, tile), 1), (x, out), (rows,), constants, 8 if columns >= TILE else 4)
    return out


@triton.jit(do_not_specialize=["rows"])
def _centred_rows(x, out, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = (row * WIDTH)[:, None] + column[None, :]
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(wide, 1) * (1.0 / WIDTH)
    tl.store(out + at, (wide - mean[:, None]).to(out.dtype.element_ty), mask=inside)


CENTRED_ROWS = Kernel(_centred_rows)


ROW_SUM_BLOCK = 1024


def row_sum(rows: Tensor, at: Tensor) -> Tensor:
    """out[i] = rows[at[i, 0]] + rows[at[i, 1]] + …, in that order, in fp32, rounded once.

    rows: [m, features] contiguous; at: [n, terms] int64, a negative number for a missing term.
    returns: [n, features] of rows' dtype; 0 if all terms are missing. CPU and GPU give the same bits.
    """
    out = rows.new_empty(at.shape[0], rows.shape[1])
    return _row_sum_triton(rows, at, out) if rows.is_cuda else _row_sum_torch(rows, at, out)


def _row_sum_torch(rows: Tensor, at: Tensor, out: Tensor) -> Tensor:
    total = rows.new_zeros(out.shape).float()
    for column in at.unbind(1):
        there = (column >= 0).unsqueeze(1)
        if rows.shape[0]:
            total = total + rows[column.clamp(min=0)].float().where(there, 0.0)
    return out.copy_(total)


def _row_sum_triton(rows: Tensor, at: Tensor, out: Tensor) -> Tensor:
    features = rows.shape[1]
    if out.numel():
        programs = triton.cdiv(features, ROW_SUM_BLOCK) * len(at)
        ROW_SUM.launch((programs, 1), (rows, at, out), (), (features, at.shape[1], ROW_SUM_BLOCK))
    return out


@triton.jit
def _row_sum(rows, at, out, FEATURES: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr):
    across: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // across).to(tl.int64)
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for term in tl.static_range(TERMS):
        row = tl.load(at + token * TERMS + term)
        total += tl.load(rows + row * FEATURES + column, mask=(column < FEATURES) & (row >= 0), other=0.0).to(
            tl.float32
        )
    tl.store(out + token * FEATURES + column, total.to(out.dtype.element_ty), mask=column < FEATURES)


ROW_SUM = Kernel(_row_sum)


TOKEN_SUM_BLOCK = 256


def token_sum(values: Tensor, shards: int) -> Tensor:
    """Return the sum of each leaf of each shard.

    values:  [tokens, features]; shards: n, which divides tokens.
    returns: [n, L, features] fp32; L is a power of two and depends only on tokens/n.
    """
    return _token_sum_triton(values, shards) if values.is_cuda else _token_sum_torch(values, shards)


def _token_sum_torch(values: Tensor, shards: int) -> Tensor:
    leaves = leaves_of(len(values) // shards)
    total = torch.zeros(shards, leaves, values.shape[1])
    for token in values.float().view(shards, leaves, -1, values.shape[1]).unbind(2):
        total += token
    return total


def _token_sum_triton(values: Tensor, shards: int) -> Tensor:
    tokens, features = values.shape
    values = values.contiguous()
    leaves = leaves_of(tokens // shards)
    out = torch.empty(shards, leaves, features, dtype=torch.float32, device=values.device)
    grid = (triton.cdiv(features, TOKEN_SUM_BLOCK), shards * leaves)
    constants = (tokens // shards // leaves, features % 16 == 0, TOKEN_SUM_BLOCK)
    TOKEN_SUM.launch(grid, (values, out), (features,), constants)
    return out


@triton.jit(do_not_specialize=["features"])
def _token_sum(values, out, features, TOKENS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    if ALIGNED:
        features = tl.multiple_of(features, 16)
    leaf = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < features
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for token in range(TOKENS):
        total += tl.load(values + (leaf * TOKENS + token) * features + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + leaf * features + column, total, mask=inside)


TOKEN_SUM = Kernel(_token_sum)


ROW_ADD_BLOCK = 512
READ_AHEAD = 8  # rows to read before the first of them is added: the additions wait for each other, the reads need not


def add_rows(rows: Tensor, at: Tensor, out: Tensor, at_once: bool = False) -> None:
    """out[at[0]] += rows[0], out[at[1]] += rows[1], …: one addition after the other in fp32, in this order.

    rows:    [n, features] contiguous; at: [n] int64, a negative number for a row to leave out.
    out:     [m, features] fp32, contiguous. CPU and GPU give the same bits. No row of `out` depends on the others.
    at_once: add up the rows of a number from 0 on, in their order, and then add their sum to `out`.
    """
    (_add_rows_triton if rows.is_cuda else _add_rows_torch)(rows, at, out, at_once)


def _add_rows_torch(rows: Tensor, at: Tensor, out: Tensor, at_once: bool) -> None:
    there = at >= 0
    rows, at = rows[there].float(), at[there]
    if at_once:
        numbers, at = at.unique(return_inverse=True)
        out.index_add_(0, numbers, out.new_zeros(len(numbers), out.shape[1]).index_add_(0, at, rows))
    else:
        out.index_add_(0, at, rows)


def _add_rows_triton(rows: Tensor, at: Tensor, out: Tensor, at_once: bool) -> None:
    if not rows.numel():
        return
    number, order = torch.sort(at, stable=True)
    end = torch.searchsorted(number, number, right=True)  # of the run of equal numbers at each place
    programs = triton.cdiv(out.shape[1], ROW_ADD_BLOCK) * len(at)
    ROW_ADD.launch(
        (programs, 1), (rows, number, order, end, out), (), (out.shape[1], ROW_ADD_BLOCK, READ_AHEAD, at_once)
    )


@triton.jit
def _add_rows(
    rows, number, order, end, out,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    place = (tl.program_id(0) // across).to(tl.int64)
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(number + place)
    before = tl.load(number + place - 1, mask=place > 0, other=-1)
    # The first place of a run of equal numbers adds all of it.
    if (mine >= 0) & (mine != before):
        stop = tl.load(end + place)
        there = out + mine * FEATURES + column
        earlier = tl.load(there, mask=column < FEATURES, other=0.0)
        total = tl.zeros_like(earlier) if AT_ONCE else earlier
        for start in range(place, stop, AHEAD):
            for n in tl.static_range(AHEAD):
                valid = start + n < stop
                row = tl.load(order + start + n, mask=valid, other=0)
                value = tl.load(rows + row * FEATURES + column, mask=valid & (column < FEATURES), other=0.0)
                total = tl.where(valid, total + value.to(tl.float32), total)
        if AT_ONCE:
            total = earlier + total
        tl.store(there, total, mask=column < FEATURES)


ROW_ADD = Kernel(_add_rows)
