# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in stated IEEE fp32 arithmetic: a CPU and every GPU give the same bits. Interface and shards of rms_norm.py.

    s      = rsqrt(sum(x²) / d + eps)              every sum over d is a fold (ieee_sums.py)
    y      = (x s) weight                          rounded once
    a      = sum((dy weight) (x s)) / d
    dx     = ((dy weight) - (x s) a) s             rounded once
    dw     = sum over rows of dy (x s)

The last sum: each of n shards has its rows in L leaves of equal size, the rows of a leaf are added in R lanes (row i of
the leaf to lane i % R), and the lanes are folded. R is the number of rows in a tile of TILE numbers. The caller adds
leaves and shards in tree order. Rows are counted token by token, and within a token by heads.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.cpu.numba_loop import cpu_loop
from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.kernels.row_sums import leaves_of
from tp_invariant_recipes.portable.ieee.math import (
    fold_columns,
    fold_rows,
    numba_fold,
    numba_fold_rows,
    power_of_two,
    rsqrt,
)
from tp_invariant_recipes.portable.ieee.storage import load_fp32, store_rounded, stored, widened
from tp_invariant_recipes.portable.shared_source import (
    UNFUSED,
    as_array,
    as_stored,
    by_rows,
    elementwise,
    numba_version,
)

TILE = 4096  # numbers that are added side by side


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x²) + eps) * weight, in fp32, rounded once.

    x:       [tokens, heads, d] bf16 or fp32; weight: [d] of either dtype.
    returns: y, x's shape and dtype, contiguous; scale, [tokens, heads, 1] fp32.
    """
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scale = torch.empty((*x.shape[:2], 1), dtype=torch.float32, device=x.device)
    rows, width = scale.numel(), x.shape[2]
    if x.is_cuda:
        forward_triton(x, weight, y, scale, eps)
    else:
        arrays = as_array(x).reshape(rows, width), as_array(y).reshape(rows, width), as_array(scale).reshape(rows)
        by_rows(_forward_loop, arrays, as_array(weight.float()), np.float32(eps), work=x.numel())
    return y, scale


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shards: int, by_heads: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and the weight's in leaves.

    dy, x:   [tokens, heads, d]; weight: [d]; scale: [tokens, heads, 1], as forward returned it.
    shards:  n, this rank's; by_heads: whether they divide the heads or the tokens.
    returns: dx, x's shape and dtype, contiguous; leaves, [n, L, d] fp32, L a power of two.
    """
    dy, x = dy.contiguous(), x.contiguous()
    tokens, heads, width = x.shape
    shape = _shape_of_leaves(tokens, heads, width, shards, by_heads)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    leaves = torch.empty((shards, shape.leaves, width), dtype=torch.float32, device=x.device)
    if x.is_cuda:
        backward_triton(dy, x, weight, scale, dx, leaves, shape)
        return dx, leaves
    flat = [as_array(array).reshape(-1, width) for array in (dy, x, dx)]
    out = as_array(leaves).reshape(-1, width)
    numbers = (shape.leaves, shape.rows, shape.group, heads, shape.token_step, shape.head_step, shape.lanes)
    others = (*flat, as_array(weight.float()), as_array(scale).reshape(-1), numbers)
    by_rows(_backward_loop, (np.arange(len(out)), out), *others, work=x.numel())
    return dx, leaves


class _Shape:
    """Leaves of a shard; rows and lanes of a leaf; heads of a token in a shard; steps from one shard to the next."""

    def __init__(self, tokens: int, heads: int, width: int, shards: int, by_heads: bool) -> None:
        self.group = heads // shards if by_heads else heads
        self.token_step, self.head_step = (0, self.group) if by_heads else (tokens // shards, 0)
        rows = tokens * heads // shards
        self.leaves = leaves_of(rows, triton.cdiv(TILE, width))
        self.rows = rows // self.leaves
        self.lanes = min(max(1, TILE // power_of_two(width)), power_of_two(self.rows))


_shape_of_leaves = cache(_Shape)


@elementwise
def norm_scale(total, width, eps):
    """Return the factor of a row whose squares have this sum."""
    return rsqrt(tl.div_rn(total, width) + eps)


_norm_scale = numba_version("norm_scale")


@cpu_loop
def _forward_loop(x: Any, y: Any, scale: Any, weight: Any, eps: Any) -> None:
    rows, width = x.shape
    size = 1
    while size < width:
        size *= 2
    squares = np.zeros(size, np.float32)
    for row in range(rows):
        for i in range(width):
            value = widened(x[row, i])
            squares[i] = value * value
        s = _norm_scale(numba_fold(squares), np.float32(width), eps)
        scale[row] = stored(s, scale)
        for i in range(width):
            y[row, i] = stored((widened(x[row, i]) * s) * weight[i], y)


@cpu_loop
def _backward_loop(places: Any, out: Any, dy: Any, x: Any, dx: Any, weight: Any, scale: Any, numbers: Any) -> None:
    leaves, rows, group, heads, token_step, head_step, lanes = numbers
    width = out.shape[1]
    size = 1
    while size < width:
        size *= 2
    products = np.zeros(size, np.float32)
    total = np.empty((lanes, width), np.float32)
    for n in range(places.size):
        shard, leaf = places[n] // leaves, places[n] % leaves
        total[:] = 0.0
        for i in range(rows):
            at = leaf * rows + i
            row = (shard * token_step + at // group) * heads + shard * head_step + at % group
            s = scale[row]
            lane = total[i % lanes]
            for j in range(width):
                normal, wide = widened(x[row, j]) * s, widened(dy[row, j])
                products[j] = (wide * weight[j]) * normal
                lane[j] += wide * normal
            along = numba_fold(products) / np.float32(width)
            for j in range(width):
                normal, dnormal = widened(x[row, j]) * s, widened(dy[row, j]) * weight[j]
                dx[row, j] = stored((dnormal - normal * along) * s, dx)
        sums = numba_fold_rows(total)
        for j in range(width):
            out[n, j] = stored(sums[j], out)


def forward_triton(x: Tensor, weight: Tensor, y: Tensor, scale: Tensor, eps: float) -> None:
    """Fill y and scale. All contiguous; Triton's interpreter takes CPU tensors."""
    rows, width = scale.numel(), x.shape[2]
    columns = power_of_two(width)
    tile, warps = _tile(columns, TILE // 2)
    tensors, constants = (as_stored(x), as_stored(weight), as_stored(y), scale), (width, columns, tile)
    FORWARD.launch((triton.cdiv(rows, tile), 1), tensors, (rows, eps), constants, warps)


def backward_triton(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, dx: Tensor, leaves: Tensor, shape: _Shape
) -> None:
    """Fill dx and leaves. All contiguous; Triton's interpreter takes CPU tensors."""
    heads, width = x.shape[1:]
    columns = power_of_two(width)
    tile, warps = _tile(columns, TILE)
    block = min(columns, max(1, 256 * warps // shape.lanes))  # eight numbers a thread
    programs = triton.cdiv(width, block) + triton.cdiv(shape.rows, tile)
    tensors = (as_stored(dy), as_stored(x), as_stored(weight), scale, as_stored(dx), leaves)
    numbers = (heads, shape.token_step, shape.head_step)
    constants = (shape.group, shape.rows, shape.leaves, width, columns, shape.lanes, block, tile)
    BACKWARD.launch((shape.leaves * programs, len(leaves)), tensors, numbers, constants, warps)


def _tile(columns: int, numbers: int) -> tuple[int, int]:
    """Rows and warps of a program: a row lies in few warps, since each level of a fold across warps waits for all."""
    return (max(1, numbers // columns), 4) if columns <= 256 else (1, max(1, columns // 2048))


@triton.jit(do_not_specialize=["rows", "eps"])
def _ieee_norm_forward(
    x, weight, y, scale, rows, eps,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = (row * WIDTH)[:, None] + column[None, :]
    wide = load_fp32(x + at, inside)
    s = norm_scale(fold_columns(wide * wide, ROWS, COLUMNS), WIDTH * 1.0, eps)
    w = load_fp32(weight + column, column < WIDTH)
    store_rounded(scale + row, s, row < rows)
    store_rounded(y + at, (wide * s[:, None]) * w[None, :], inside)


@triton.jit
def _scaled_rows(
    x, dy, scale, start, column, leaf, shard, heads, token_step, head_step,
    GROUP: tl.constexpr, ROWS_OF_LEAF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of ROWS rows of a leaf, from `start` on: x s, dy, s, where they lie, whether there, and which rows are known."""
    i = start + tl.arange(0, ROWS)
    known = i < ROWS_OF_LEAF
    i = leaf * ROWS_OF_LEAF + i
    row = (shard * token_step + i // GROUP) * heads + shard * head_step + i % GROUP
    inside = known[:, None] & (column < WIDTH)[None, :]
    at = (row * WIDTH)[:, None] + column[None, :]
    s = tl.load(scale + row, mask=known, other=0.0)[:, None]
    return load_fp32(x + at, inside) * s, load_fp32(dy + at, inside), s, at, inside, known[:, None]


@triton.jit
def _columns_of_leaf(
    dy, x, scale, gradient, first, leaf, shard, heads, token_step, head_step,
    GROUP: tl.constexpr, ROWS_OF_LEAF: tl.constexpr, LEAVES: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    column = first + tl.arange(0, BLOCK)
    total = tl.zeros((LANES, BLOCK), dtype=tl.float32)
    for start in tl.range(0, ROWS_OF_LEAF, LANES, loop_unroll_factor=8):  # so that loads wait side by side
        normal, wide, _, _, _, known = _scaled_rows(
            x, dy, scale, start, column, leaf, shard, heads, token_step, head_step, GROUP, ROWS_OF_LEAF, WIDTH, LANES
        )
        total = tl.where(known, total + wide * normal, total)
    sums = fold_rows(total, LANES, BLOCK)
    store_rounded(gradient + (shard * LEAVES + leaf) * WIDTH + column, sums, column < WIDTH)


@triton.jit(do_not_specialize=["heads", "token_step", "head_step"])
def _ieee_norm_backward(
    dy, x, weight, scale, dx, gradient, heads, token_step, head_step,
    GROUP: tl.constexpr, ROWS_OF_LEAF: tl.constexpr, LEAVES: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Give a leaf programs for BLOCK columns of the weight's gradient each, then others for ROWS rows of dx each.

    Both read x and dy, the second time from the cache. No row waits for another, and no column for the sum of a row.
    """
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    PROGRAMS: tl.constexpr = BLOCKS + (ROWS_OF_LEAF + ROWS - 1) // ROWS
    leaf, number = (tl.program_id(0) // PROGRAMS).to(tl.int64), tl.program_id(0) % PROGRAMS
    shard = tl.program_id(1).to(tl.int64)
    if number < BLOCKS:
        _columns_of_leaf(
            dy, x, scale, gradient, number * BLOCK, leaf, shard, heads, token_step, head_step,
            GROUP, ROWS_OF_LEAF, LEAVES, WIDTH, LANES, BLOCK,
        )  # fmt: skip
    else:
        start, column = (number - BLOCKS) * ROWS, tl.arange(0, COLUMNS)
        normal, wide, s, at, inside, _ = _scaled_rows(
            x, dy, scale, start, column, leaf, shard, heads, token_step, head_step, GROUP, ROWS_OF_LEAF, WIDTH, ROWS
        )
        dnormal = wide * load_fp32(weight + column, column < WIDTH)[None, :]
        along = tl.div_rn(fold_columns(dnormal * normal, ROWS, COLUMNS), WIDTH * 1.0)[:, None]
        store_rounded(dx + at, (dnormal - normal * along) * s, inside)


FORWARD, BACKWARD = Kernel(_ieee_norm_forward, **UNFUSED), Kernel(_ieee_norm_backward, **UNFUSED)
