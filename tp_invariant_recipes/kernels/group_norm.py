# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of groups of features, each with its own weights: forward, and backward with leaves of the weight gradient.

Groups lie in n shards of one shape. A group's outputs and gradients depend only on that group. The weight gradient is
a sum over tokens, cut into L equal leaves; L depends only on the number of tokens and the width. A kernel is compiled
for the groups of one shard, never for the number of shards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.kernels.row_sums import folding_sum, leaves_of

TILE = 4096  # elements of x in one program at a time


def group_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, in fp32, rounded once.

    x:       [n, rows, groups, d], contiguous; weight: [n, groups, d].
    returns: y, x's shape and dtype; scale, [n, rows, groups, 1] fp32: 1 / sqrt(mean(x²) + eps).
    """
    _check(x)
    return (_forward_triton if x.is_cuda else _forward_torch)(x, weight.contiguous(), eps)


def group_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and the leaves of the weight gradient.

    dy, x, weight: as in forward, dy of x's shape; scale: as forward returned it.
    returns: dx, x's shape and dtype; leaves, [n, L, groups, d] fp32, L a power of two.
    """
    _check(x)
    backward = _backward_triton if x.is_cuda else _backward_torch
    return backward(dy.contiguous(), x, weight.contiguous(), scale)


def _check(x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError("the groups of a norm lie one after the other")


def _forward_torch(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, scale = torch.empty_like(x), torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
    for shard in range(x.shape[0]):  # one at a time: its incomplete vectors are then the same for all numbers of shards
        wide = x[shard].float()
        mean = folding_sum(wide * wide, -1) * (1.0 / x.shape[-1])
        scale[shard] = (1.0 / torch.sqrt(mean + eps)).unsqueeze(-1)
        y[shard] = wide * scale[shard] * weight[shard].float()
    return y, scale


def _backward_torch(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    dx, sums = torch.empty_like(x), []
    for shard in range(x.shape[0]):
        wide, normal = dy[shard].float(), x[shard].float() * scale[shard]
        dnormal = wide * weight[shard].float()
        along = folding_sum(dnormal * normal, -1).unsqueeze(-1) * (1.0 / x.shape[-1])
        dx[shard] = (dnormal - normal * along) * scale[shard]
        sums.append(folding_sum(wide * normal, 0))
    return dx, torch.stack(sums).unsqueeze(1)


def _forward_triton(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    shards, rows, groups, width = x.shape
    y = torch.empty_like(x)
    scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    tile, columns = _tile(width)
    grid = (triton.cdiv(rows, tile), shards * groups)
    FORWARD.launch(grid, (x, weight, y, scale), (rows, eps), (groups, width, tile, columns))
    return y, scale


def _backward_triton(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    shards, rows, groups, width = x.shape
    tile, columns = _tile(width)
    leaves = leaves_of(rows, tile)
    dx = torch.empty_like(x)
    sums = torch.empty(shards, leaves, groups, width, dtype=torch.float32, device=x.device)
    BACKWARD.launch(
        (leaves, shards * groups), (dy, x, weight, scale, dx, sums), (rows,),
        (rows // leaves, leaves, groups, width, tile, columns),
    )  # fmt: skip
    return dx, sums


def _tile(width: int) -> tuple[int, int]:
    """Rows and columns in one program at a time."""
    columns = triton.next_power_of_2(width)
    return max(1, TILE // columns), columns


@triton.jit(do_not_specialize=["rows", "eps"])
def _group_norm_forward(
    x, weight, y, scale, rows, eps,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)  # counted over all shards
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    place = (group // GROUPS * rows + row) * GROUPS + group % GROUPS
    at = (place * WIDTH)[:, None] + column[None, :]
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(wide * wide, 1) * (1.0 / WIDTH)
    s = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    w = tl.load(weight + group * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    result = wide * s[:, None] * w[None, :]
    tl.store(scale + place, s, mask=row < rows)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _group_norm_backward(
    dy, x, weight, scale, dx, sums, rows,
    ROWS_OF_LEAF: tl.constexpr, LEAVES: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    leaf, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    shard = group // GROUPS
    column = tl.arange(0, COLUMNS)
    w = tl.load(weight + group * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, ROWS_OF_LEAF, ROWS):
        i = start + tl.arange(0, ROWS)
        known = i < ROWS_OF_LEAF
        inside = known[:, None] & (column < WIDTH)[None, :]
        place = (shard * rows + leaf * ROWS_OF_LEAF + i) * GROUPS + group % GROUPS
        at = (place * WIDTH)[:, None] + column[None, :]
        s = tl.load(scale + place, mask=known, other=0.0)[:, None]
        normal = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * s
        wide = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        dnormal = wide * w[None, :]
        along = tl.sum(dnormal * normal, 1)[:, None] * (1.0 / WIDTH)
        tl.store(dx + at, ((dnormal - normal * along) * s).to(dx.dtype.element_ty), mask=inside)
        total += wide * normal
    out = sums + ((shard * LEAVES + leaf) * GROUPS + group % GROUPS) * WIDTH + column
    tl.store(out, tl.sum(total, 0), mask=column < WIDTH)


FORWARD, BACKWARD = Kernel(_group_norm_forward), Kernel(_group_norm_backward)
