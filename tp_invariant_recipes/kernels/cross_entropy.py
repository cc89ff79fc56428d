# SPDX-License-Identifier: Apache-2.0
"""Sums and gradients of exponentials over the shards of a vocabulary.

A shard's sum is made by the same program whatever shards lie beside it. The torch functions hold few shards in fp32 at
a time.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from tp_invariant_recipes.cpu_host.vectors import VECTORS
from tp_invariant_recipes.kernels.launch import Kernel, alignment
from tp_invariant_recipes.kernels.row_sums import folding_sum

BLOCK = 4096
NUMBERS_AT_ONCE = 1 << 20  # numbers that the torch functions hold in fp32 at a time, unless one shard has more


def sum_of_exponentials(logits: Tensor, highest: Tensor, shards: int) -> Tensor:
    """sum(exp(logits - highest)) of each shard.

    logits:  [rows, vocab/t], contiguous; highest: [rows] fp32; shards: n, which divides vocab/t.
    returns: [n, rows] fp32.
    """
    rows, size = logits.shape
    partials = torch.empty(shards, rows, dtype=torch.float32, device=logits.device)
    if logits.is_cuda:
        grid, shard = (rows, shards), size // shards
        SUM.launch(grid, (logits, highest, partials), (rows, size), (shard, alignment(shard), BLOCK), num_warps=8)
    else:
        groups = partials.split(_shards_at_once(logits, shards))
        for group, exponentials in zip(groups, _exponentials(logits, highest, shards), strict=True):
            group.copy_(folding_sum(exponentials.view(rows, len(group), -1), -1).t())
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
        GRADIENT.launch(grid, tensors, (size,), (alignment(size), BLOCK), num_warps=8)
        return out
    every_row = torch.arange(rows)
    parts = out.split(size // shards * _shards_at_once(logits, shards), -1)
    for part, softmax in zip(parts, _exponentials(logits, highest, shards), strict=True):
        softmax /= total.unsqueeze(-1)
        mine = (index >= 0) & (index < part.shape[1])
        softmax[every_row, index.clamp(0, part.shape[1] - 1)] -= mine.float()
        part.copy_(softmax.mul_(gradient.unsqueeze(-1)))
        index = index - part.shape[1]
    return out


def log_probabilities(logits: Tensor, highest: Tensor, logarithm: Tensor) -> Tensor:
    """0.0 - (logarithm - ((logits - highest) + 0.0)), in fp32.

    logits:  [rows, n], contiguous; highest, logarithm of the sum: [rows] fp32.
    returns: [rows, n] fp32.
    """
    if not logits.is_cuda:
        picked = (logits - highest.unsqueeze(-1)).add_(0.0)
        return 0.0 - (logarithm.unsqueeze(-1) - picked)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    rows, size = logits.shape
    grid = (rows, triton.cdiv(size, BLOCK))
    PROBABILITIES.launch(grid, (logits, highest, logarithm, out), (size,), (alignment(size), BLOCK), num_warps=8)
    return out


def count_greater(logits: Tensor, limit: Tensor) -> Tensor:
    """How many numbers of each row are greater than the row's limit, int64 [rows].

    logits: [rows, n], contiguous; limit: [rows] fp32, contiguous.
    """
    if not logits.is_cuda:
        return (logits > limit.unsqueeze(-1)).sum(-1)
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    size = logits.shape[1]
    GREATER.launch((len(logits), 1), (logits, limit, out), (size,), (alignment(size), BLOCK), num_warps=8)
    return out


def _exponentials(logits: Tensor, highest: Tensor, shards: int) -> Iterator[Tensor]:
    """exp(logits - highest) of groups of shards in order, each [rows, vocab of a group] fp32, contiguous, yours."""
    for group in logits.split(logits.shape[1] // shards * _shards_at_once(logits, shards), -1):
        yield (group - highest.unsqueeze(-1)).contiguous().exp_()


def _shards_at_once(logits: Tensor, shards: int) -> int:
    """Shards of a group. exp has the bits that a shard has alone only where a shard is whole vectors."""
    alone = logits.numel() // shards
    return max(1, min(shards, NUMBERS_AT_ONCE // alone)) if alone % VECTORS == 0 else 1


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
    row = tl.program_id(0).to(tl.int64)
    start = tl.multiple_of(row * size, ALIGNMENT)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column // ALIGNMENT < size // ALIGNMENT  # a mask of whole vectors, so that loads are of 16 bytes
    value = tl.load(logits + start + column, mask=inside).to(tl.float32)
    softmax = tl.div_rn(libdevice.exp(value - tl.load(highest + row)), tl.load(total + row))
    softmax -= tl.where(column == tl.load(index + row), 1.0, 0.0)
    result = softmax * tl.load(gradient + row)
    tl.store(out + start + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["size"])
def _log_probabilities(logits, highest, logarithm, out, size, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = tl.multiple_of(row * size, ALIGNMENT)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column // ALIGNMENT < size // ALIGNMENT
    picked = (tl.load(logits + start + column, mask=inside).to(tl.float32) - tl.load(highest + row)) + 0.0
    tl.store(out + start + column, 0.0 - (tl.load(logarithm + row) - picked), mask=inside)


@triton.jit(do_not_specialize=["size"])
def _count_greater(logits, limit, out, size, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start, than = logits + tl.multiple_of(row * size, ALIGNMENT), tl.load(limit + row)
    counts = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column // ALIGNMENT < size // ALIGNMENT
        value = tl.load(start + column, mask=inside, other=float("-inf")).to(tl.float32)
        counts += (value > than).to(tl.int32)
    tl.store(out + row, tl.sum(counts, 0).to(tl.int64))


SUM, GRADIENT = Kernel(_cross_entropy_sum), Kernel(_cross_entropy_gradient)
PROBABILITIES, GREATER = Kernel(_log_probabilities), Kernel(_count_greater)
