# SPDX-License-Identifier: Apache-2.0
"""Cross entropy in stated IEEE fp32 arithmetic: a CPU and every GPU give the same bits. Interface of cross_entropy.py.

    e         = exp(logit - highest)
    sum       of a shard of the vocabulary, in lanes (ieee_sums.py): LANES, or fewer for a smaller shard
    gradient  = (e / total - [column = index]) gradient of the loss, rounded once to the logits' dtype

The caller adds the shards in tree order, and has the logarithm of the total from here.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.cpu.numba_loop import cpu_loop
from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.portable.ieee.math import ONE_FP32, ZERO, exp, fold_columns, log, numba_fold, power_of_two
from tp_invariant_recipes.portable.ieee.storage import load_fp32, store_rounded, stored, widened
from tp_invariant_recipes.portable.shared_source import UNFUSED, as_stored, elementwise, fill, numba_version

LANES = 4096
BLOCK = 1024


def sum_of_exponentials(logits: Tensor, highest: Tensor, shards: int) -> Tensor:
    """sum(exp(logits - highest)) of each shard.

    logits:  [rows, vocab/t], contiguous, bf16 or fp32; highest: [rows] fp32; shards: n, which divides vocab/t.
    returns: [n, rows] fp32.
    """
    parts = logits.unflatten(1, (shards, -1))
    sums = torch.empty(parts.shape[:2], dtype=torch.float32, device=logits.device)
    lanes = min(LANES, power_of_two(parts.shape[2]))
    fill(sum_triton, _sum_loop, (parts, highest, sums), lanes, work=logits.numel())
    return sums.t().contiguous()


def softmax_gradient(
    logits: Tensor, index: Tensor, highest: Tensor, total: Tensor, gradient: Tensor, shards: int
) -> Tensor:
    """(exp(logits - highest) / total - [column = index]) * gradient.

    logits:  [rows, vocab/t], contiguous; index: [rows] int64, the target's column here, or one outside.
    highest, total, gradient: [rows] fp32. shards: of no effect; every element has its own result.
    returns: logits' shape and dtype.
    """
    out = torch.empty_like(logits)
    tensors = (logits, index, highest, total, gradient.contiguous(), out)
    fill(gradient_triton, _gradient_loop, tensors, work=logits.numel())
    return out


def logarithm(total: Tensor) -> Tensor:
    """log(total), element by element: fp32, of total's shape."""
    total, out = total.contiguous(), torch.empty(total.shape, dtype=torch.float32, device=total.device)
    fill(log_triton, _log_loop, (total.view(-1), out.view(-1)), work=total.numel())
    return out


@elementwise
def softmax_slope(logit, highest, total, is_target, gradient):
    """One element of the gradient."""
    softmax = tl.div_rn(exp(logit - highest), total)
    return (softmax - tl.where(is_target, ONE_FP32, ZERO)) * gradient


_exp, _log, _softmax_slope = (numba_version(name) for name in ("exp", "log", "softmax_slope"))


@cpu_loop
def _sum_loop(logits: Any, highest: Any, sums: Any, lanes: int) -> None:
    rows, shards, size = logits.shape
    lane = np.empty(lanes, np.float32)
    for row in range(rows):
        top = highest[row]
        for shard in range(shards):
            values = logits[row, shard]
            lane[:] = 0.0
            for start in range(0, size, lanes):
                part = values[start : start + lanes]
                for i in range(part.size):
                    lane[i] += _exp(widened(part[i]) - top)
            sums[row, shard] = stored(numba_fold(lane), sums)


@cpu_loop
def _gradient_loop(logits: Any, index: Any, highest: Any, total: Any, gradient: Any, out: Any) -> None:
    for row in range(logits.shape[0]):
        values, mine = logits[row], out[row]
        target, top, whole, factor = index[row], highest[row], total[row], gradient[row]
        for i in range(values.size):
            mine[i] = stored(_softmax_slope(widened(values[i]), top, whole, i == target, factor), out)


@cpu_loop
def _log_loop(total: Any, out: Any) -> None:
    for i in range(total.size):
        out[i] = stored(_log(total[i]), out)


def sum_triton(logits: Tensor, highest: Tensor, sums: Tensor, lanes: int) -> None:
    """Fill sums. logits: [rows, shards, size]. All contiguous; Triton's interpreter takes CPU tensors."""
    rows, shards, size = logits.shape
    tensors = (as_stored(logits), highest, sums)
    SUM.launch((rows, shards), tensors, (shards,), (size, lanes), 8 if lanes == LANES else 4)


def gradient_triton(
    logits: Tensor, index: Tensor, highest: Tensor, total: Tensor, gradient: Tensor, out: Tensor
) -> None:
    """Fill out. All contiguous; Triton's interpreter takes CPU tensors."""
    rows, size = logits.shape
    tensors = (as_stored(logits), index, highest, total, gradient, as_stored(out))
    GRADIENT.launch((rows, triton.cdiv(size, BLOCK)), tensors, (size,), (BLOCK,))


def log_triton(total: Tensor, out: Tensor) -> None:
    """Fill out. Both contiguous; Triton's interpreter takes CPU tensors."""
    LOG.launch((triton.cdiv(total.numel(), BLOCK), 1), (total, out), (total.numel(),), (BLOCK,))


@triton.jit(do_not_specialize=["shards"])
def _ieee_cross_entropy_sum(logits, highest, sums, shards, SIZE: tl.constexpr, LANES: tl.constexpr):
    row, shard = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    top = tl.load(highest + row)
    total = tl.zeros((LANES,), dtype=tl.float32)
    values = logits + (row * shards + shard) * SIZE
    for start in range(0, SIZE, LANES):
        column = start + tl.arange(0, LANES)
        inside = column < SIZE
        total = tl.where(inside, total + exp(load_fp32(values + column, inside) - top), total)
    whole = fold_columns(tl.reshape(total, [1, LANES]), 1, LANES)
    lane = tl.arange(0, 1)
    store_rounded(sums + row * shards + shard + lane, whole, lane < 1)


@triton.jit(do_not_specialize=["size"])
def _ieee_cross_entropy_gradient(logits, index, highest, total, gradient, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    is_target = column == tl.load(index + row)
    logit = load_fp32(logits + row * size + column, inside)
    slope = softmax_slope(logit, tl.load(highest + row), tl.load(total + row), is_target, tl.load(gradient + row))
    store_rounded(out + row * size + column, slope, inside)


@triton.jit(do_not_specialize=["size"])
def _ieee_log(total, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    store_rounded(out + at, log(load_fp32(total + at, inside)), inside)


SUM, GRADIENT, LOG = (
    Kernel(kernel, **UNFUSED) for kernel in (_ieee_cross_entropy_sum, _ieee_cross_entropy_gradient, _ieee_log)
)
