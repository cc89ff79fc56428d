"""Add rows to rows of a sum, chosen by number: the gradient of a table that a batch of numbers was looked up in."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.launch import Kernel

BLOCK = 512
AHEAD = 8  # rows to read before the first of them is added: the additions wait for each other, the reads need not


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
    programs = triton.cdiv(out.shape[1], BLOCK) * len(at)
    KERNEL.launch((programs, 1), (rows, number, order, end, out), (), (out.shape[1], BLOCK, AHEAD, at_once))


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


KERNEL = Kernel(_add_rows)
