"""Sums of a few rows each, in a given order: the experts' outputs for a token, or the gradients of its copies."""

import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.launch import Kernel

BLOCK = 1024


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
        programs = triton.cdiv(features, BLOCK) * len(at)
        KERNEL.launch((programs, 1), (rows, at, out), (), (features, at.shape[1], BLOCK))
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


KERNEL = Kernel(_row_sum)
