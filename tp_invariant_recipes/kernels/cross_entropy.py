"""Sums and gradients of exponentials over the shards of a vocabulary.

A shard's sum is made by the same program whatever shards lie beside it. The torch functions add in another order; CPU
and GPU agree to rounding, each with itself to the last bit. They take all shards in one call where a shard's numbers
are whole vectors (host/vectors.py), and else one shard after the other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from tp_invariant_recipes.host.vectors import VECTORS
from tp_invariant_recipes.kernels.folding_sum import folding_sum
from tp_invariant_recipes.kernels.launch import Kernel

BLOCK = 4096


def sum_of_exponentials(logits: Tensor, highest: Tensor, shards: int) -> Tensor:
    """sum(exp(logits - highest)) of each shard.

    logits:  [rows, vocab/t], contiguous; highest: [rows] fp32; shards: n, which divides vocab/t.
    returns: [n, rows] fp32.
    """
    rows, size = logits.shape
    partials = torch.empty(shards, rows, dtype=torch.float32, device=logits.device)
    if logits.is_cuda:
        grid, shard = (rows, shards), size // shards
        SUM.launch(grid, (logits, highest, partials), (rows, size), (shard, _alignment(shard), BLOCK), num_warps=8)
    else:
        partials.copy_(folding_sum(_exponentials(logits, highest, shards).view(rows, shards, -1), -1).t())
    return partials


def softmax_gradient(
    logits: Tensor, index: Tensor, highest: Tensor, total: Tensor, gradient: Tensor, shards: int
) -> Tensor:
    """(exp(logits - highest) / total - [column = index]) * gradient.

    logits:  [rows, vocab/t], contiguous; index: [rows] int64, the target's column here, or one outside.
    highest, total, gradient: [rows] fp32.
    shards:  as for the sum.
    returns: logits' shape and dtype.
    """
    out = torch.empty_like(logits)
    rows, size = logits.shape
    if logits.is_cuda:
        grid = (rows, triton.cdiv(size, BLOCK))
        tensors = (logits, index, highest, total, gradient, out)
        GRADIENT.launch(grid, tensors, (size,), (_alignment(size), BLOCK), num_warps=8)
        return out
    softmax = _exponentials(logits, highest, shards).div_(total.unsqueeze(-1))
    mine = (index >= 0) & (index < size)
    softmax[torch.arange(rows), index.clamp(0, size - 1)] -= mine.float()
    return out.copy_(softmax.mul_(gradient.unsqueeze(-1)))


def _exponentials(logits: Tensor, highest: Tensor, shards: int) -> Tensor:
    """exp(logits - highest), [rows, vocab/t] fp32, contiguous, yours. A shard's bits are those it has alone."""
    differences = logits - highest.unsqueeze(-1)
    if differences.numel() // shards % VECTORS == 0:
        return differences.exp_()
    return torch.cat([shard.contiguous().exp_() for shard in differences.chunk(shards, -1)], -1)


def _alignment(size: int) -> int:
    return min(16, size & -size)


@triton.jit(do_not_specialize=["rows", "size"])
def _cross_entropy_sum(
    logits, highest, partials, rows, size, SHARD: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr
):
    row, shard = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    top = tl.load(highest + row)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    # A hint that is the same for every t: how loads are spread over threads decides the order of additions.
    start = logits + tl.multiple_of(row * size + shard * SHARD, ALIGNMENT)
    for first in range(0, SHARD, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(start + column, mask=column < SHARD, other=float("-inf")).to(tl.float32)
        total += tl.where(column < SHARD, libdevice.exp(value - top), 0.0)
    tl.store(partials + shard * rows + row, tl.sum(total, 0))


@triton.jit(do_not_specialize=["size"])
def _cross_entropy_gradient(
    logits, index, highest, total, gradient, out, size, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr
):
    size = tl.multiple_of(size, ALIGNMENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(logits + row * size + column, mask=inside).to(tl.float32)
    softmax = tl.div_rn(libdevice.exp(value - tl.load(highest + row)), tl.load(total + row))
    softmax -= tl.where(column == tl.load(index + row), 1.0, 0.0)
    result = softmax * tl.load(gradient + row)
    tl.store(out + row * size + column, result.to(out.dtype.element_ty), mask=inside)


SUM, GRADIENT = Kernel(_cross_entropy_sum), Kernel(_cross_entropy_gradient)
