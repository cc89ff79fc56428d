# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in stated IEEE fp32 arithmetic, token by token: a CPU and every GPU give the same bits.

Of a head with unit keys and queries, of a state S [value, key], row v by row v; a = exp(g), every operation rounded
once, every sum over the keys' features a fold (ieee_math.py):

    m = a S[t-1]      d = β (v - fold(m k))      S[t] = m + d k      o = fold(S[t] q)

A state is all that a later token reads of the earlier ones. So a sequence may be computed in parts of any length, and
beside any others: a pass over the whole has the same bits. That is why the rule is a recurrence here, and no product of
chunks as in kernels/delta_rule.py; a GPU walks the tokens one after the other.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.cpu.cpu_threads import by_parts
from tp_invariant_recipes.kernels.cpu.numba_loop import cpu_loop
from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.portable.ieee.functions import fold
from tp_invariant_recipes.portable.ieee.math import ZERO, fold_columns, numba_fold, power_of_two
from tp_invariant_recipes.portable.shared_source import SMALL, UNFUSED, as_array

ROWS = 8  # of a state in a program
SEGMENT = 64  # tokens between two states that a backward pass keeps


class Numbers(NamedTuple):
    """Of each row and head, fp32. q, k: [rows, heads, key]; v: [rows, heads, value]; decay, strength: [rows, heads]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    strength: Tensor


def delta_rule(numbers: Numbers, spans: Tensor, step: int, states: Tensor) -> Tensor:
    """Walk the tokens of some sequences, from their states, which then are those after the last token.

    spans:   [n, 4] int32: a span's first row, its rows, `step` apart (0: none), its state, and whether this begins with
             zeros. states: [slots, heads, value, key] fp32, contiguous.
    returns: [rows, heads, value] fp32; zeros where no span is.
    """
    q, k, v, decay, strength = (x.contiguous() for x in numbers)
    out = torch.zeros_like(v)
    tensors = q, k, v, decay, strength, states, out, spans
    if v.is_cuda:
        delta_triton(*tensors, step)
        return out
    arrays, heads = tuple(map(as_array, tensors)), v.shape[1]
    pays = v.numel() * q.shape[-1] > SMALL
    by_parts(lambda i, j: _loop(i, j, *arrays, step), len(spans) * heads, pays=pays)
    return out


@cpu_loop
def _loop(
    begin: int, end: int, q: Any, k: Any, v: Any, decay: Any, strength: Any, states: Any, out: Any, spans: Any,
    step: int,
) -> None:  # fmt: skip
    """Of the units begin … end - 1: a head of a span each."""
    heads, width = v.shape[1:]
    features = q.shape[2]
    size = 1
    while size < features:
        size *= 2
    terms = np.zeros(size, np.float32)
    for unit in range(begin, end):
        span, head = spans[unit // heads], unit % heads
        state = states[span[2], head]
        for t in range(span[1]):
            row = span[0] + t * step
            key, query, a = k[row, head], q[row, head], decay[row, head]
            for i in range(width):
                line = state[i]
                for j in range(size):
                    terms[j] = np.float32(0)
                for j in range(features):
                    line[j] = np.float32(0) if t == 0 and span[3] != 0 else a * line[j]
                    terms[j] = line[j] * key[j]
                d = strength[row, head] * (v[row, head, i] - numba_fold(terms))
                for j in range(size):
                    terms[j] = np.float32(0)
                for j in range(features):
                    line[j] = line[j] + d * key[j]
                    terms[j] = line[j] * query[j]
                out[row, head, i] = numba_fold(terms)


def delta_triton(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, states: Tensor, out: Tensor, spans: Tensor,
    step: int,
) -> None:  # fmt: skip
    """Fill out and states, where spans are. All contiguous; Triton's interpreter takes CPU tensors."""
    heads, width = v.shape[1:]
    tensors = (q, k, v, decay, strength, states, out, spans)
    constants = (heads, q.shape[2], power_of_two(q.shape[2]), width, ROWS)
    DELTA.launch((len(spans) * heads, triton.cdiv(width, ROWS)), tensors, (step,), constants)


@triton.jit(do_not_specialize=["step"])
def _ieee_delta_rule(
    q, k, v, decay, strength, states, out, spans, step,
    HEADS: tl.constexpr, KEY: tl.constexpr, COLUMNS: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    span, head = spans + tl.program_id(0) // HEADS * 4, tl.program_id(0) % HEADS
    first, count, slot, fresh = tl.load(span), tl.load(span + 1), tl.load(span + 2).to(tl.int64), tl.load(span + 3)
    line, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside, key_inside = line < VALUE, column < KEY
    at = states + ((slot * HEADS + head) * VALUE + line)[:, None] * KEY + column[None, :]
    mask = inside[:, None] & key_inside[None, :]
    state = tl.load(at, mask=mask & (fresh == 0), other=0.0)
    for t in range(count):
        row = (first + t * step).to(tl.int64) * HEADS + head
        key = tl.load(k + row * KEY + column, mask=key_inside, other=0.0)[None, :]
        query = tl.load(q + row * KEY + column, mask=key_inside, other=0.0)[None, :]
        value = tl.load(v + row * VALUE + line, mask=inside, other=0.0)
        state = tl.where((fresh != 0) & (t == 0), ZERO, state * tl.load(decay + row))
        d = tl.load(strength + row) * (value - fold_columns(state * key, ROWS, COLUMNS))
        state = state + d[:, None] * key
        tl.store(out + row * VALUE + line, fold_columns(state * query, ROWS, COLUMNS), mask=inside)
    if count > 0:
        tl.store(at, state, mask=mask)


DELTA = Kernel(_ieee_delta_rule, **UNFUSED)


def delta_rule_backward(gradient: Tensor, numbers: Numbers) -> Numbers:
    """Return the gradients of all numbers of whole sequences; everything [s, n, …], n sequences and heads.

    gradient: of the output. From the last token to the first, with e = fold(dS k) over the key:

        dS = dS + do q      dq = fold(S do)      dv = β e      dβ = fold(e (v - fold(m k)))      dm = dS + (-dv) k
        dk = fold(dS d) + fold(m (-dv))          da = fold(fold(dm S[t-1]))      dS of the token before = a dm

    States are kept for each SEGMENT-th token, and computed again between. torch's operations: slower than the rule.
    """
    q, k, v, a, b = numbers
    state, kept = v.new_zeros(*v.shape[1:], k.shape[2]), []
    for t in range(len(v)):
        if t % SEGMENT == 0:
            kept.append(state)
        state = _token(state, k[t], v[t], a[t], b[t])[-1]
    out, ds = Numbers(*map(torch.empty_like, numbers)), torch.zeros_like(state)
    for segment in range(len(kept) - 1, -1, -1):
        tokens = range(segment * SEGMENT, min((segment + 1) * SEGMENT, len(v)))
        states = [kept[segment]]
        passed = []
        for t in tokens:
            passed.append(_token(states[-1], k[t], v[t], a[t], b[t]))
            states.append(passed[-1][-1])
        for t, before, (m, rest, d, after) in reversed(list(zip(tokens, states, passed, strict=False))):
            do = gradient[t].unsqueeze(2)
            ds = ds + do * q[t].unsqueeze(1)
            e = fold(ds * k[t].unsqueeze(1)).squeeze(2)
            dv = b[t].unsqueeze(1) * e
            du = -dv.unsqueeze(2)
            dm = ds + du * k[t].unsqueeze(1)
            out.q[t] = fold(after * do, 1).squeeze(1)
            out.k[t] = (fold(ds * d.unsqueeze(2), 1) + fold(m * du, 1)).squeeze(1)
            out.v[t] = dv
            out.strength[t] = fold(e * rest).squeeze(1)
            out.decay[t] = fold(fold(dm * before).squeeze(2)).squeeze(1)
            ds = a[t].view(-1, 1, 1) * dm
    return out


def _token(state: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """m, v - fold(m k), d and the next state of a token; state: [n, value, key]."""
    m = a.view(-1, 1, 1) * state
    rest = v - fold(m * k.unsqueeze(1)).squeeze(2)
    d = b.unsqueeze(1) * rest
    return m, rest, d, m + d.unsqueeze(2) * k.unsqueeze(1)
