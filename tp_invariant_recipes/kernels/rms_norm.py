# SPDX-License-Identifier: Apache-2.0
"""RMSNorm: forward, and backward with the weight gradient in leaves of fixed shape.

Rows are x[token, head]; without heads there is one row per token. A row's output and gradient depend only on that row.
The weight gradient is a sum over rows, so the rows of each of this rank's n shards are cut into L equal leaves with
separate sums; L and the rows of a leaf depend on the size of a shard, never on this rank's number of shards.

    shards are chunks of tokens:      shard v holds tokens v·T/n …, all heads
    shards are groups of heads:       shard v holds heads v·H/n …, all tokens

A kernel is compiled for shapes that no t changes (width, heads of a shard, rows of a leaf); counts and strides that t
does change are not specialised on, so one binary serves every t.
"""

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.launch import Kernel, alignment
from tp_invariant_recipes.kernels.row_sums import fold, leaves_of

TILE = 4096  # elements of x that a program holds at a time
# Tiles of dy and x on their way: the 128 programs of two shards would not hide the latency of memory otherwise.
AHEAD = tl.constexpr(4)


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x²) + eps) * weight, in fp32, rounded once.

    x:       [tokens, heads, d], the last dimension contiguous; weight: [d].
    returns: y, x's shape and dtype, contiguous; scale, [tokens, heads, 1] fp32: 1 / sqrt(mean(x²) + eps).
    """
    return _forward_triton(x, weight, eps) if x.is_cuda else _forward_cpu(x, weight, eps)


def _forward_cpu(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.detach().float()  # torch broadcasts faster than NumPy, and NumPy does the rest
    array = wide.numpy()
    mean = fold(array * array, -1)
    mean *= 1.0 / x.shape[-1]
    mean += np.float32(eps)
    scale = torch.from_numpy(mean).sqrt_().reciprocal_().unsqueeze(-1)  # its root is not NumPy's
    return (wide * scale).mul_(weight.float()).to(x.dtype), scale


def _forward_triton(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not _is_aligned(x.shape, x.stride()):
        x = x.contiguous()
    tokens, heads, _ = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    scale = torch.empty(tokens, heads, 1, dtype=torch.float32, device=x.device)
    grid, numbers, constants, warps = _forward_plan(x.shape, x.stride())
    FORWARD.launch(grid, (x, weight, y, scale), (*numbers, eps), constants, warps)
    return y, scale


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shards: int, by_heads: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and the weight's in leaves.

    dy, x:   [tokens, heads, d]; weight: [d]; scale: [tokens, heads, 1], as forward returned it.
    shards:  n, this rank's; by_heads: whether they divide the heads or the tokens.
    returns: dx, x's shape and dtype, contiguous; leaves, [n, L, d] fp32, L a power of two.
    """
    backward = _backward_triton if x.is_cuda else _backward_cpu
    return backward(dy, x, weight, scale, shards, by_heads)


def _backward_triton(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shards: int, by_heads: bool
) -> tuple[Tensor, Tensor]:
    if not _is_aligned(x.shape, x.stride()):
        x = x.contiguous()
    if not _is_aligned(dy.shape, dy.stride()):
        dy = dy.contiguous()
    grid, numbers, constants, warps = _backward_plan(x.shape, dy.stride(), x.stride(), shards, by_heads)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    leaves = torch.empty(shards, grid[0], x.shape[2], dtype=torch.float32, device=x.device)
    BACKWARD.launch(grid, (dy, x, weight, scale, dx, leaves), numbers, constants, warps)
    return dx, leaves


def _backward_cpu(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shards: int, by_heads: bool
) -> tuple[Tensor, Tensor]:
    (tokens, _, width), wide = x.shape, dy.float()
    normal = x.float() * scale
    dnormal = wide * weight.float()
    products = wide.numpy() * normal.numpy()
    along = fold(dnormal.numpy() * normal.numpy(), -1)
    along *= 1.0 / width
    dx = dnormal.sub_(normal.mul_(torch.from_numpy(along).unsqueeze(-1))).mul_(scale).to(x.dtype)
    if by_heads:
        products = fold(products.reshape(tokens, shards, -1, width), 0)
    return dx, torch.from_numpy(fold(products.reshape(shards, -1, width), 1)).unsqueeze(1)


_Plan = tuple[tuple[int, int], tuple[int, ...], tuple[int, ...], int]  # grid, numbers, constants, warps


@cache
def _forward_plan(shape: tuple[int, ...], strides: tuple[int, ...]) -> _Plan:
    tokens, heads, width = shape
    tile, constants, warps = _tile(width, TILE)
    return (triton.cdiv(tokens * heads, tile), 1), (tokens * heads, heads, strides[0], strides[1]), constants, warps


@cache
def _backward_plan(
    shape: tuple[int, ...], dy_strides: tuple[int, ...], x_strides: tuple[int, ...], shards: int, by_heads: bool
) -> _Plan:
    tokens, heads, width = shape
    group = heads // shards if by_heads else heads  # heads of a token in a shard
    token_step, head_step = (0, group) if by_heads else (tokens // shards, 0)  # from one shard to the next
    rows = tokens * heads // shards
    leaves = leaves_of(rows, triton.cdiv(TILE, width))
    _, constants, warps = _tile(width, rows // leaves * triton.next_power_of_2(width))
    numbers = (heads, token_step, head_step, dy_strides[0], dy_strides[1], x_strides[0], x_strides[1])
    return (leaves, shards), numbers, (group, rows // leaves, leaves, *constants), warps


def _tile(width: int, elements: int) -> tuple[int, tuple[int, ...], int]:
    """Rows of a tile of at most TILE elements; the constants WIDTH, ALIGNMENT, COLUMNS, ROWS; warps."""
    columns = triton.next_power_of_2(width)
    rows = max(1, min(elements, TILE) // columns)
    rows = 1 << (rows.bit_length() - 1)
    return rows, (width, alignment(width), columns, rows), 8 if rows * columns >= TILE else 4


@cache
def _is_aligned(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the strides are the multiples that the kernels are told; rows of one token or head have none."""
    multiple = alignment(shape[2])
    return strides[2] == 1 and all(strides[d] % multiple == 0 for d in (0, 1) if shape[d] > 1)


@triton.jit(do_not_specialize=["rows", "heads", "token_stride", "head_stride", "eps"])
def _rms_norm_forward(
    x, weight, y, scale, rows, heads, token_stride, head_stride, eps,
    WIDTH: tl.constexpr, ALIGNMENT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = tl.multiple_of((row // heads) * token_stride + (row % heads) * head_stride, ALIGNMENT)
    wide = tl.load(x + at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(wide * wide, 1) * (1.0 / WIDTH)
    s = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    result = wide * s[:, None] * w[None, :]
    tl.store(scale + row, s, mask=row < rows)
    tl.store(y + (row * WIDTH)[:, None] + column[None, :], result.to(y.dtype.element_ty), mask=inside)


_FREE_BACKWARD = [
    "heads", "token_step", "head_step", "dy_token_stride", "dy_head_stride", "x_token_stride", "x_head_stride"
]  # fmt: skip


@triton.jit(do_not_specialize=_FREE_BACKWARD)
def _rms_norm_backward(
    dy, x, weight, scale, dx, gradient, heads, token_step, head_step,
    dy_token_stride, dy_head_stride, x_token_stride, x_head_stride,
    GROUP: tl.constexpr, ROWS_OF_LEAF: tl.constexpr, LEAVES: tl.constexpr,
    WIDTH: tl.constexpr, ALIGNMENT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    leaf, shard = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in tl.range(0, ROWS_OF_LEAF, ROWS, num_stages=AHEAD):
        i = start + tl.arange(0, ROWS)
        known = i < ROWS_OF_LEAF
        i = leaf * ROWS_OF_LEAF + i
        token = shard * token_step + i // GROUP
        head = shard * head_step + i % GROUP
        inside = known[:, None] & (column < WIDTH)[None, :]
        at_x = tl.multiple_of(token * x_token_stride + head * x_head_stride, ALIGNMENT)
        at_dy = tl.multiple_of(token * dy_token_stride + head * dy_head_stride, ALIGNMENT)
        row = token * heads + head
        s = tl.load(scale + row, mask=known, other=0.0)[:, None]
        normal = tl.load(x + at_x[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32) * s
        wide = tl.load(dy + at_dy[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        dnormal = wide * w[None, :]
        along = tl.sum(dnormal * normal, 1)[:, None] * (1.0 / WIDTH)
        result = (dnormal - normal * along) * s
        tl.store(dx + (row * WIDTH)[:, None] + column[None, :], result.to(dx.dtype.element_ty), mask=inside)
        total += wide * normal
    out = gradient + (shard * LEAVES + leaf) * WIDTH + column
    tl.store(out, tl.sum(total, 0), mask=column < WIDTH)


FORWARD, BACKWARD = Kernel(_rms_norm_forward), Kernel(_rms_norm_backward)
