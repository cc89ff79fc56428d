# SPDX-License-Identifier: Apache-2.0
"""A causal convolution per channel, then SiLU: forward, and backward with sums over tokens in leaves.

Channels lie in n shards of one shape. A channel's outputs and gradients depend only on that channel, and a kernel runs
on tiles of one shard, so neither depends on the number of shards. The sums over tokens, which give the gradients of
weight and bias, are cut into L equal leaves; L depends only on the number of tokens.

Rows are [s, b] flattened, so the previous token is b rows earlier. On a CPU each shard is computed separately: torch
rounds exp differently in its vector code and in its code for the last numbers, which fill no vector.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.kernels.row_sums import folding_sum, leaves_of

TAPS = 4  # Megatron's width of the convolution
ROWS, CHANNELS = 16, 64


def causal_conv_forward(x: Tensor, weight: Tensor, bias: Tensor, step: int) -> Tensor:
    """silu(bias + the sum over k of weight[k] * x[row - (TAPS - 1 - k) * step]), added in that order in fp32.

    x:       [n, rows, c], contiguous; weight: [n, c, TAPS]; bias: [n, c]; step: rows to the previous token.
    returns: x's shape and dtype, rounded once.
    """
    _check(x, weight)
    return (_forward_triton if x.is_cuda else _forward_torch)(x, weight.contiguous(), bias.contiguous(), step)


def causal_conv_backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and the leaves of the gradients of weight and bias.

    dy, x, weight, bias, step: as in forward, dy of x's shape.
    returns: dx, x's shape and dtype; leaves, [n, L, TAPS + 1, c] fp32, the bias last, L a power of two.
    """
    _check(x, weight)
    backward = _backward_triton if x.is_cuda else _backward_torch
    return backward(dy.contiguous(), x, weight.contiguous(), bias.contiguous(), step)


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.shape[-1] != TAPS or not x.is_contiguous():
        raise ValueError(f"the convolution takes {TAPS} weights a channel and contiguous rows, not {weight.shape[-1]}")


def _forward_torch(x: Tensor, weight: Tensor, bias: Tensor, step: int) -> Tensor:
    y = torch.empty_like(x)
    for shard in range(x.shape[0]):
        before, _ = _before(x[shard], weight[shard], bias[shard], step)
        y[shard] = before * torch.sigmoid(before)
    return y


def _before(x: Tensor, weight: Tensor, bias: Tensor, step: int) -> tuple[Tensor, list[Tensor]]:
    """[rows, c] before the activation, and the x that each weight multiplies; fp32."""
    rows = x.shape[0]
    padded = torch.zeros(rows + (TAPS - 1) * step, x.shape[1])
    padded[(TAPS - 1) * step :] = x
    past = [padded[tap * step : tap * step + rows] for tap in range(TAPS)]
    y = bias.float().expand(x.shape)
    for tap in range(TAPS):
        y = y + weight[:, tap].float() * past[tap]
    return y, past


def _backward_torch(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, step: int) -> tuple[Tensor, Tensor]:
    dx, sums = torch.empty_like(x), []
    for shard in range(x.shape[0]):
        before, past = _before(x[shard], weight[shard], bias[shard], step)
        s = torch.sigmoid(before)
        g = dy[shard].float() * (s * (1.0 + before * (1.0 - s)))
        later = torch.cat((g, g.new_zeros((TAPS - 1) * step, g.shape[1])))
        total = torch.zeros_like(g)
        for tap in range(TAPS):
            start = (TAPS - 1 - tap) * step
            total = total + weight[shard, :, tap].float() * later[start : start + g.shape[0]]
        dx[shard] = total
        sums.append(torch.stack([*(folding_sum(g * p, 0) for p in past), folding_sum(g, 0)]))
    return dx, torch.stack(sums).unsqueeze(1)


def _forward_triton(x: Tensor, weight: Tensor, bias: Tensor, step: int) -> Tensor:
    shards, rows, channels = x.shape
    y = torch.empty_like(x)
    tiles = triton.cdiv(rows, ROWS)
    programs = triton.cdiv(channels, CHANNELS) * shards * tiles
    FORWARD.launch((programs, 1), (x, weight, bias, y), (rows, tiles, step), (channels, ROWS, CHANNELS))
    return y


def _backward_triton(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, step: int) -> tuple[Tensor, Tensor]:
    shards, rows, channels = x.shape
    leaves = leaves_of(rows, ROWS)
    inner = torch.empty(x.shape, dtype=torch.float32, device=x.device)  # the gradient of the activation's input
    sums = torch.empty(shards, leaves, TAPS + 1, channels, dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(channels, CHANNELS)
    INNER.launch(
        (blocks, shards * leaves), (dy, x, weight, bias, inner, sums), (rows, leaves, step),
        (rows // leaves, channels, ROWS, CHANNELS),
    )  # fmt: skip
    dx = torch.empty_like(x)
    tiles = triton.cdiv(rows, ROWS)
    OUTER.launch((blocks * shards * tiles, 1), (inner, weight, dx), (rows, tiles, step), (channels, ROWS, CHANNELS))
    return dx, sums


@triton.jit
def _rows_of(values, shard, row, column, inside, rows, WIDTH: tl.constexpr):
    """Rows of one shard, with zeros for rows outside it."""
    at = (shard * rows + row) * WIDTH
    there = (row >= 0) & (row < rows)
    return tl.load(values + at[:, None] + column[None, :], mask=there[:, None] & inside, other=0.0).to(tl.float32)


@triton.jit
def _tap(weight, shard, column, tap, WIDTH: tl.constexpr):
    return tl.load(weight + (shard * WIDTH + column) * 4 + tap, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _bias(bias, shard, column, WIDTH: tl.constexpr):
    return tl.load(bias + shard * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _tile(tiles, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return this program's shard, its rows and its columns; tiles: of rows, in a shard."""
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // across
    row = (tile % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return (tile // tiles).to(tl.int64), row, tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)


_FREE = ["rows", "tiles", "step"]


@triton.jit(do_not_specialize=_FREE)
def _conv_forward(
    x, weight, bias, y, rows, tiles, step, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    shard, row, column = _tile(tiles, WIDTH, ROWS, COLUMNS)
    inside = (column < WIDTH)[None, :]
    before = tl.zeros((ROWS, COLUMNS), dtype=tl.float32) + _bias(bias, shard, column, WIDTH)
    for tap in tl.static_range(4):
        past = _rows_of(x, shard, row - (3 - tap) * step, column, inside, rows, WIDTH)
        before += _tap(weight, shard, column, tap, WIDTH) * past
    at = (shard * rows + row) * WIDTH
    result = before * tl.sigmoid(before)
    tl.store(y + at[:, None] + column[None, :], result.to(y.dtype.element_ty), mask=(row < rows)[:, None] & inside)


@triton.jit(do_not_specialize=["rows", "leaves", "step"])
def _conv_inner(
    dy, x, weight, bias, inner, sums, rows, leaves, step,
    ROWS_OF_LEAF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    leaf = tl.program_id(1).to(tl.int64)  # counted over all shards
    shard = leaf // leaves
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < WIDTH)[None, :]
    b = _bias(bias, shard, column, WIDTH)
    w0, w1 = _tap(weight, shard, column, 0, WIDTH), _tap(weight, shard, column, 1, WIDTH)
    w2, w3 = _tap(weight, shard, column, 2, WIDTH), _tap(weight, shard, column, 3, WIDTH)
    d0 = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    d1 = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    d2 = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    d3 = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    db = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, ROWS_OF_LEAF, ROWS):
        i = start + tl.arange(0, ROWS)
        known = (i < ROWS_OF_LEAF)[:, None] & inside
        row = (leaf % leaves) * ROWS_OF_LEAF + i
        x0 = _rows_of(x, shard, row - 3 * step, column, known, rows, WIDTH)
        x1 = _rows_of(x, shard, row - 2 * step, column, known, rows, WIDTH)
        x2 = _rows_of(x, shard, row - step, column, known, rows, WIDTH)
        x3 = _rows_of(x, shard, row, column, known, rows, WIDTH)
        before = b + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
        s = tl.sigmoid(before)
        g = _rows_of(dy, shard, row, column, known, rows, WIDTH) * (s * (1.0 + before * (1.0 - s)))
        tl.store(inner + ((shard * rows + row) * WIDTH)[:, None] + column[None, :], g, mask=known)
        d0 += g * x0
        d1 += g * x1
        d2 += g * x2
        d3 += g * x3
        db += g
    out = sums + leaf * 5 * WIDTH + column
    tl.store(out, tl.sum(d0, 0), mask=column < WIDTH)
    tl.store(out + WIDTH, tl.sum(d1, 0), mask=column < WIDTH)
    tl.store(out + 2 * WIDTH, tl.sum(d2, 0), mask=column < WIDTH)
    tl.store(out + 3 * WIDTH, tl.sum(d3, 0), mask=column < WIDTH)
    tl.store(out + 4 * WIDTH, tl.sum(db, 0), mask=column < WIDTH)


@triton.jit(do_not_specialize=_FREE)
def _conv_outer(inner, weight, dx, rows, tiles, step, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    shard, row, column = _tile(tiles, WIDTH, ROWS, COLUMNS)
    inside = (column < WIDTH)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tap in tl.static_range(4):
        later = _rows_of(inner, shard, row + (3 - tap) * step, column, inside, rows, WIDTH)
        total += _tap(weight, shard, column, tap, WIDTH) * later
    at = (shard * rows + row) * WIDTH
    tl.store(dx + at[:, None] + column[None, :], total.to(dx.dtype.element_ty), mask=(row < rows)[:, None] & inside)


FORWARD, INNER, OUTER = Kernel(_conv_forward), Kernel(_conv_inner), Kernel(_conv_outer)
