# SPDX-License-Identifier: Apache-2.0
"""The router of experts in stated IEEE fp32 arithmetic: a CPU and every GPU give the same bits.

order     an expert is before another one with a smaller logit, and of equal logits the lower number is first
chosen    the first topk experts
e         = exp(logit - highest), every expert
p         = e / fold(e of the chosen, +0 elsewhere)    of the chosen, rounded once to the logits' dtype; +0 elsewhere
s         = e / fold(e)                                fp32, of every expert: for the load-balancing loss
gradient  = p (dp - fold(p dp)) + s (ds - fold(s ds)), with p before its rounding; rounded once to the logits' dtype

A fold is over the experts in order, filled with +0 to a power of two (ieee_sums.py). Each row's result is its own.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numba import njit
from torch import Tensor

from tp_invariant_recipes.kernels.cpu.numba_loop import cpu_loop
from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.portable.ieee import functions
from tp_invariant_recipes.portable.ieee.math import ZERO, exp, fold_columns, numba_fold, power_of_two
from tp_invariant_recipes.portable.ieee.storage import load_fp32, store_rounded, stored, widened
from tp_invariant_recipes.portable.shared_source import UNFUSED, as_stored, elementwise, fill, numba_version


def route_tokens(logits: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the experts of each token.

    logits:  [tokens, experts], bf16 or fp32; a row without NaN.
    returns: probabilities, [tokens, experts] of the logits' dtype; scores, the same in fp32; the chosen, bool.
    """
    logits = logits.contiguous()
    probs, chosen = torch.empty_like(logits), torch.empty(logits.shape, dtype=torch.bool, device=logits.device)
    scores = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    work = logits.numel() * logits.shape[1]
    fill(forward_triton, _forward_loop, (logits, probs, scores, chosen), topk, work=work)
    return probs, scores, chosen


def route_tokens_backward(dprobs: Tensor, dscores: Tensor, logits: Tensor, chosen: Tensor) -> Tensor:
    """Return the gradient of the logits, of their shape and dtype.

    dprobs: [tokens, experts], of the logits' dtype; dscores: the same in fp32; logits and chosen as of `route_tokens`.
    """
    dprobs, dscores, logits = dprobs.contiguous(), dscores.contiguous(), logits.contiguous()
    out = torch.empty_like(logits)
    fill(backward_triton, _backward_loop, (dprobs, dscores, logits, chosen, out), work=logits.numel())
    return out


@elementwise
def share(e, total):
    """Return an expert's part of a softmax."""
    return tl.div_rn(e, total)


@elementwise
def share_gradient(p, dp, along_p, s, ds, along_s):
    """Return the gradient of a logit by both softmaxes."""
    return p * (dp - along_p) + s * (ds - along_s)


_exp, _share, _share_gradient = (numba_version(name) for name in ("exp", "share", "share_gradient"))


@njit(nogil=True, error_model="numpy")
def _softmaxes(logits: Any, chosen: Any, every: Any, picked: Any, work: Any) -> None:
    """Of one row: s into `every`, p into `picked`, both +0 beyond the experts. Each of the length of a fold."""
    experts = logits.size
    highest = widened(logits[0])
    for i in range(experts):
        highest = max(highest, widened(logits[i]))
    for i in range(experts):
        every[i] = _exp(widened(logits[i]) - highest)
        picked[i] = every[i] if chosen[i] else np.float32(0.0)
    for i in range(work.size):  # numba takes seconds to compile an assignment of arrays
        work[i] = picked[i]
    total = numba_fold(work)
    for i in range(work.size):
        work[i] = every[i]
    whole = numba_fold(work)
    for i in range(experts):
        picked[i], every[i] = _share(picked[i], total), _share(every[i], whole)


@cpu_loop
def _forward_loop(logits: Any, probs: Any, scores: Any, chosen: Any, topk: int) -> None:
    rows, experts = logits.shape
    size = 1
    while size < experts:
        size *= 2
    every, picked, work = np.zeros(size, np.float32), np.zeros(size, np.float32), np.zeros(size, np.float32)
    for row in range(rows):
        for i in range(experts):
            mine, before = widened(logits[row, i]), 0
            for j in range(experts):
                other = widened(logits[row, j])
                if other > mine or (other == mine and j < i):
                    before += 1
            chosen[row, i] = before < topk
        _softmaxes(logits[row], chosen[row], every, picked, work)
        for i in range(experts):
            probs[row, i], scores[row, i] = stored(picked[i], probs), stored(every[i], scores)


@cpu_loop
def _backward_loop(dprobs: Any, dscores: Any, logits: Any, chosen: Any, out: Any) -> None:
    rows, experts = logits.shape
    size = 1
    while size < experts:
        size *= 2
    every, picked, work = np.zeros(size, np.float32), np.zeros(size, np.float32), np.zeros(size, np.float32)
    for row in range(rows):
        _softmaxes(logits[row], chosen[row], every, picked, work)
        for i in range(size):
            work[i] = picked[i] * widened(dprobs[row, i]) if i < experts else np.float32(0.0)
        along_p = numba_fold(work)
        for i in range(size):
            work[i] = every[i] * dscores[row, i] if i < experts else np.float32(0.0)
        along_s = numba_fold(work)
        for i in range(experts):
            slope = _share_gradient(picked[i], widened(dprobs[row, i]), along_p, every[i], dscores[row, i], along_s)
            out[row, i] = stored(slope, out)


def forward_triton(logits: Tensor, probs: Tensor, scores: Tensor, chosen: Tensor, topk: int) -> None:
    """Fill probs, scores and chosen. All contiguous; Triton's interpreter takes CPU tensors."""
    rows, experts = logits.shape
    tensors = (as_stored(logits), as_stored(probs), scores, chosen.view(torch.int8))
    if rows:
        FORWARD.launch((rows, 1), tensors, (), (topk, experts, power_of_two(experts)))


def backward_triton(dprobs: Tensor, dscores: Tensor, logits: Tensor, chosen: Tensor, out: Tensor) -> None:
    """Fill out. All contiguous; Triton's interpreter takes CPU tensors."""
    rows, experts = logits.shape
    tensors = (as_stored(dprobs), dscores, as_stored(logits), chosen.view(torch.int8), as_stored(out))
    if rows:
        BACKWARD.launch((rows, 1), tensors, (), (experts, power_of_two(experts)))


@triton.jit
def _folded(x, COLUMNS: tl.constexpr):
    """[COLUMNS] → [1]."""
    return fold_columns(tl.reshape(x, [1, COLUMNS]), 1, COLUMNS)


@triton.jit
def _exponentials(logits, row, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr):
    """exp(logit - highest) of a row, +0 beyond the experts; and the logits, -inf there."""
    column = tl.arange(0, COLUMNS)
    inside = column < EXPERTS
    logit = tl.where(inside, load_fp32(logits + row * EXPERTS + column, inside), float("-inf"))
    return tl.where(inside, exp(logit - tl.max(logit, 0)), ZERO), logit


@triton.jit
def _ieee_router_forward(
    logits, probs, scores, chosen, TOPK: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < EXPERTS
    every, logit = _exponentials(logits, row, EXPERTS, COLUMNS)
    other = logit[None, :]
    mine = logit[:, None]
    earlier = (other > mine) | ((other == mine) & (column[None, :] < column[:, None]))
    first = tl.sum(earlier.to(tl.int32), 1) < TOPK
    picked = tl.where(first, every, ZERO)
    at = row * EXPERTS + column
    store_rounded(probs + at, share(picked, _folded(picked, COLUMNS)), inside)
    store_rounded(scores + at, share(every, _folded(every, COLUMNS)), inside)
    tl.store(chosen + at, first.to(tl.int8), mask=inside)


@triton.jit
def _ieee_router_backward(dprobs, dscores, logits, chosen, out, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < EXPERTS
    at = row * EXPERTS + column
    every, _ = _exponentials(logits, row, EXPERTS, COLUMNS)
    first = tl.load(chosen + at, mask=inside, other=0) != 0
    picked = tl.where(first, every, ZERO)
    picked = share(picked, _folded(picked, COLUMNS))
    every = share(every, _folded(every, COLUMNS))
    dp, ds = load_fp32(dprobs + at, inside), load_fp32(dscores + at, inside)
    along_p, along_s = _folded(picked * dp, COLUMNS), _folded(every * ds, COLUMNS)
    store_rounded(out + at, share_gradient(picked, dp, along_p, every, ds, along_s), inside)


FORWARD, BACKWARD = Kernel(_ieee_router_forward, **UNFUSED), Kernel(_ieee_router_backward, **UNFUSED)


# --- Sigmoid scores (DeepSeek-V3, arXiv 2412.19437) ---

LEAST_TOTAL = 1e-20  # added to a sum of scores before it divides


def route_by_sigmoid(
    logits: Tensor, topk: int, bias: Tensor | None, groups: tuple[int, int] | None, factor: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the experts of each token by sigmoid scores: torch's operations of fp32, each rounded once.

    c = sigmoid(logit); a rank is by c + bias, then by the expert's number; of groups, the best few count alone: by the
    sum of their topk / few best ranks, in order. p = factor (c / (fold of the chosen c + 1e-20)); s as p, of all.

    logits:  [tokens, experts]. bias: [experts] fp32, of the ranks alone. groups: how many there are, and count.
    returns: probabilities, of the logits' dtype; scores, fp32; the chosen, bool. All [tokens, experts].
    """
    scores = functions.sigmoid(logits.float())
    with torch.no_grad():
        ranks = scores if bias is None else scores + bias
        if groups is not None:
            each, few = ranks.unflatten(1, (groups[0], -1)), groups[1]
            best, *others = each.sort(dim=-1, descending=True, stable=True).values[..., : topk // few].unbind(-1)
            for other in others:
                best = best + other
            ranks = each.masked_fill(~_first(best, few).unsqueeze(-1), -torch.inf).flatten(1)
        chosen = _first(ranks, topk)
    picked = torch.where(chosen, scores, 0.0)
    probs = picked / (functions.total(picked) + LEAST_TOTAL) if topk > 1 else picked
    probs = probs if factor is None else probs * factor
    return probs.to(logits.dtype), scores / (functions.total(scores) + LEAST_TOTAL), chosen


def _first(ranks: Tensor, count: int) -> Tensor:
    """Return where the `count` greatest of each row are; of equal ones the first."""
    order = ranks.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(ranks, dtype=torch.bool).scatter_(-1, order, True)
