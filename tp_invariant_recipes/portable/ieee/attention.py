# SPDX-License-Identifier: Apache-2.0
"""Causal attention in stated arithmetic, with the same bits on every machine; grouped queries; bf16.

`product` is the sum of kernels/gemm/segmented_k_gemm.py; everything else is IEEE fp32, one rounding an operation,
and `fma` is one operation. c is fp32(scale · log2 of Euler's number). For the query i of a head, over its keys j <= i:

    s_j     = product(q, k_j)                           p_j  = e_j inverse
    top     = (the largest s_j) c                       dp_j = product(dout, v_j)
    e_j     = exp2(fma(s_j, c, -top))  (ieee_math.py)   a    = fold of dout_c out_c over the features c (ieee_sums.py)
    inverse = 1 / (sum of e_j in LANES)                 ds_j = bf16((dp_j - a) p_j)
    out_c   = bf16(product(bf16(e), v_c) inverse)       dq_c = bf16(product(ds, k_c) scale)

    dv_j    = bf16(the heads of the group, added in order: product of bf16(p_j) and dout)
    dk_j    = bf16((the heads of the group, added in order: product of ds_j and q) scale)

A product over keys or queries has one accumulator, which walks them in order. Where a key comes after the query, e, p
and ds are zeros, which change no sum: they may be left out. Nothing depends on the number of groups side by side.

This is the form for a CPU, compiled by numba. It computes transposed products, so that a vector holds queries. The one
for GPUs is portable/ieee/attention_triton.py.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tp_invariant_recipes.kernels.cpu import tensor_core_cpu
from tp_invariant_recipes.kernels.cpu.numba_loop import cpu_loop
from tp_invariant_recipes.kernels.cpu.tensor_core_cpu import WIDE, add_steps, split_panels, split_rows
from tp_invariant_recipes.kernels.gemm.segmented_k_gemm import STEP
from tp_invariant_recipes.portable.ieee.attention_triton import LANES, backward_triton, exponential, forward_triton
from tp_invariant_recipes.portable.ieee.math import bf16_bits, fp32_of_bf16, numba_fold, numba_fold_rows
from tp_invariant_recipes.portable.shared_source import as_array, by_rows, numba_version

LOG2_E = math.log2(math.e)

_exponential, _bf16, _fp32 = (numba_version(function.__name__) for function in (exponential, bf16_bits, fp32_of_bf16))


class Attended(NamedTuple):
    """out: [s, b, h, d] bf16; top, inverse: [b · g, h / g, s] fp32, which the backward pass needs."""

    out: Tensor
    top: Tensor
    inverse: Tensor


def attention_forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
    """softmax(scale · query · key^T) · value, causal.

    query:      [s, b, h, d] bf16; key, value: [s, b, g, d], g divides h.
    scale:      of the scores, rounded to fp32.
    raises TypeError: other dtypes; ValueError: other shapes.
    """
    _check(query, key, value)
    s, b, h, d = query.shape
    groups = key.shape[2]
    if query.is_cuda:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        result = torch.empty_like(query)
        top, inverse = query.new_empty(2, b * groups, h // groups, s, dtype=torch.float32)
        forward_triton(query, key, value, result, top, inverse, _of_powers_of_two(scale))
        return Attended(result, top, inverse)
    q, k, v = _by_group(query, groups), _by_group(key, groups)[:, 0], _by_group(value, groups)[:, 0]
    units, heads = q.shape[:2]
    out = torch.zeros(units, heads, d, s, dtype=torch.bfloat16)
    top, inverse = torch.zeros(2, units, heads, s)
    arrays = (*map(_bits, (q.transpose(2, 3), k, v.transpose(1, 2), out)), as_array(top), as_array(inverse))
    numbers = np.float32(_of_powers_of_two(scale)), np.int32(tensor_core_cpu.KEPT_BITS)
    by_rows(forward_loop, arrays, *numbers, work=2 * units * heads * s * s * d)
    return Attended(_by_position(out.transpose(2, 3), b), top, inverse)


def attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, of their shapes, bf16.

    gradient: of the output, [s, b, h, d] bf16; the rest as `attention_forward` had and gave it.
    """
    _check(query, key, value)
    s, b, _, d = query.shape
    groups = key.shape[2]
    if query.is_cuda:
        gradient, query, key, value = (x.contiguous() for x in (gradient, query, key, value))
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        scales = _of_powers_of_two(scale), float(np.float32(scale))
        backward_triton(gradient, query, key, value, *attended, *gradients, *scales)
        return gradients
    q, k, v = _by_group(query, groups), _by_group(key, groups)[:, 0], _by_group(value, groups)[:, 0]
    o, do = _by_group(attended.out, groups), _by_group(gradient, groups)
    units, heads = q.shape[:2]
    dq = torch.zeros(units, heads, d, s, dtype=torch.bfloat16)
    dk, dv = torch.zeros(2, units, d, s, dtype=torch.bfloat16)
    arrays = (
        *map(_bits, (q.transpose(2, 3), k, v, k.transpose(1, 2), do, do.transpose(2, 3), o)),
        as_array(attended.top), as_array(attended.inverse), *map(_bits, (dq, dk, dv)),
    )  # fmt: skip
    numbers = np.float32(_of_powers_of_two(scale)), np.float32(scale), np.int32(tensor_core_cpu.KEPT_BITS)
    by_rows(_backward, arrays, *numbers, work=5 * units * heads * s * s * d)
    return (
        _by_position(dq.transpose(2, 3), b),
        _by_position(dk.transpose(1, 2).unsqueeze(1), b),
        _by_position(dv.transpose(1, 2).unsqueeze(1), b),
    )


def _of_powers_of_two(scale: float) -> float:
    """c of the definition."""
    return float(np.float32(scale * LOG2_E))


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    if any(x.dtype != torch.bfloat16 for x in (query, key, value)):
        raise TypeError(f"attention of {query.dtype}, {key.dtype} and {value.dtype}; all must be bf16")
    (s, b, h, d), g = query.shape, key.shape[2]
    if key.shape != (s, b, g, d) or value.shape != key.shape or h % g:
        raise ValueError(f"attention of {[*query.shape]}, {[*key.shape]} and {[*value.shape]}")


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[s, b, h, d] → [b · g, h / g, s, d]."""
    s, b, h, d = x.shape
    return x.detach().reshape(s, b, groups, h // groups, d).permute(1, 2, 3, 0, 4).reshape(b * groups, -1, s, d)


def _by_position(x: Tensor, batch: int) -> Tensor:
    """[b · g, h / g, s, d] → [s, b, h, d]."""
    return x.reshape(batch, -1, *x.shape[2:]).permute(2, 0, 1, 3).contiguous()


def _bits(x: Tensor) -> Any:
    return as_array(x.contiguous()).view(np.uint16)


@cpu_loop
def _panel(words: Any) -> Any:
    """[k, WIDE] bits of bf16 → values, exponents and highest of one panel; k is a multiple of STEP."""
    values, exponents, highest = split_panels(words)
    return values[0], exponents[0], highest[0]


@cpu_loop
def _queries(words: Any, first: Any, last: Any) -> Any:
    """Columns first … last - 1 of [d, s] as a panel of WIDE."""
    part = np.zeros((words.shape[0], WIDE), np.uint16)
    for row in range(len(words)):  # numba takes seconds to compile an assignment of arrays
        for i in range(first, last):
            part[row, i - first] = words[row, i]
    return _panel(part)


@cpu_loop
def _products(rows: Any, panel: Any, first: Any, last: Any, kept: Any, out: Any) -> None:
    """out[j, i] = product of row j < last and query first + i; anything where the key comes after the query."""
    (a, ea, ha), (b, eb, hb) = rows, panel
    out[:last] = np.float32(0)
    lanes = np.int64(1), np.int64(0), -first, np.int64(0), last - first
    add_steps(out[:last], np.int64(0), a[:last], ea[:last], ha[:last], np.int64(0), b, eb, hb, lanes, kept)


@cpu_loop
def _over_keys(rows: Any, words: Any, first: Any, last: Any, kept: Any, out: Any) -> None:
    """out[c, i] = sum over keys j of rows[c, j] words[j, i], bits of bf16, zeros where j comes after first + i.

    Of first + i < last: the others are not wanted.
    """
    (a, ea, ha), (b, eb, hb) = rows, _panel(words)
    out[:] = np.float32(0)
    lanes = np.int64(0), np.int64(1), -first, np.int64(0), last - first
    add_steps(out, np.int64(0), a, ea, ha, np.int64(0), b, eb, hb, lanes, kept)


@cpu_loop
def _over_queries(rows: Any, words: Any, first: Any, kept: Any, out: Any) -> None:
    """out[c, j] = sum over queries i of rows[c, first + i] words[i, j], zeros where the key j comes after i."""
    (a, ea, ha), (b, eb, hb) = rows, _panel(words)
    out[:] = np.float32(0)
    lanes = np.int64(0), np.int64(0), np.int64(0), np.int64(1), np.int64(STEP)
    add_steps(out, np.int64(0), a, ea, ha, first, b, eb, hb, lanes, kept)


@cpu_loop
def forward_loop(q: Any, keys: Any, values: Any, out: Any, top: Any, inverse: Any, scale: Any, kept: Any) -> None:
    """q: [u, r, d, s], the last s of t positions; keys: [u, t, d]; values: [u, d, t], all as bits of bf16.

    Fill out, [u, r, d, s] bits of bf16, and top and inverse, [u, r, s].
    """
    heads, d, s = q.shape[1:]
    before = keys.shape[1] - s  # the first query's position
    padded = (before + s + STEP - 1) // STEP * STEP
    scores, words = np.empty((padded, WIDE), np.float32), np.empty((padded, WIDE), np.uint16)
    lanes, sums = np.empty((LANES, WIDE), np.float32), np.empty((d, WIDE), np.float32)
    most, part = np.empty(WIDE, np.float32), np.empty(WIDE, np.float32)
    for unit in range(q.shape[0]):
        k, v = split_rows(keys[unit]), split_rows(values[unit])
        for head in range(heads):
            for number in range(0, s, WIDE):
                first, last = before + number, before + min(number + WIDE, s)
                whole = (last + STEP - 1) // STEP * STEP
                _products(k, _queries(q[unit, head], number, last - before), first, last, kept, scores)
                most[:] = np.float32(-np.inf)
                for j in range(last):
                    for i in range(WIDE):
                        score = scores[j, i] if j <= first + i else np.float32(-np.inf)
                        most[i] = score if score > most[i] else most[i]
                for i in range(WIDE):
                    most[i] *= scale
                lanes[:] = np.float32(0)
                words[last:whole] = 0
                for j in range(last):
                    lane, word = lanes[j % LANES], words[j]
                    for i in range(WIDE):
                        e = _exponential(scores[j, i], scale, most[i]) if j <= first + i else np.float32(0)
                        lane[i] += e
                        word[i] = np.uint16(_bf16(e))
                numba_fold_rows(lanes)
                for i in range(WIDE):
                    part[i] = np.float32(1) / lanes[0, i]
                _over_keys(v, words[:whole], first, last, kept, sums)
                for c in range(d):
                    for i in range(last - first):
                        out[unit, head, c, number + i] = np.uint16(_bf16(sums[c, i] * part[i]))
                for i in range(last - first):
                    top[unit, head, number + i], inverse[unit, head, number + i] = most[i], part[i]


@cpu_loop
def _along(do: Any, o: Any, out: Any) -> None:
    """out[i] = the fold of do_c o_c over the features c; do, o: [rows, d] bits of bf16."""
    size = 1
    while size < do.shape[1]:
        size *= 2
    terms = np.empty(size, np.float32)
    for i in range(do.shape[0]):
        terms[:] = np.float32(0)
        for c in range(do.shape[1]):
            terms[c] = _fp32(np.int32(do[i, c])) * _fp32(np.int32(o[i, c]))
        out[i] = numba_fold(terms)


@cpu_loop
def _add(part: Any, total: Any) -> None:
    """total += part, [d, WIDE]. As a sum of arrays numba would compile the message of an error, for seconds."""
    for c in range(len(total)):
        for i in range(WIDE):
            total[c, i] += part[c, i]


@cpu_loop
def _backward(
    q: Any, keys: Any, values: Any, keys_t: Any, do: Any, do_t: Any, o: Any, top: Any, inverse: Any, dq: Any, dk: Any,
    dv: Any, scale: Any, scale_of_gradients: Any, kept: Any,
) -> None:  # fmt: skip
    """q, do_t, dq: [u, r, d, s]; keys, values: [u, s, d]; keys_t, dk, dv: [u, d, s]; do, o: [u, r, s, d]."""
    heads, d, s = q.shape[1:]
    padded, panels = (s + STEP - 1) // STEP * STEP, (s + WIDE - 1) // WIDE
    scores, slopes = np.empty((padded, WIDE), np.float32), np.empty((padded, WIDE), np.float32)
    ps, gradients = np.empty((padded, WIDE), np.uint16), np.empty((padded, WIDE), np.uint16)  # bits of p and of ds
    # Of every panel of keys, all queries: the same, transposed.
    all_ps, all_gradients = (np.empty((panels, padded, WIDE), np.uint16), np.empty((panels, padded, WIDE), np.uint16))
    most, part, along = np.zeros(WIDE, np.float32), np.zeros(WIDE, np.float32), np.zeros(WIDE, np.float32)
    sums = np.empty((d, WIDE), np.float32)
    total_k, total_v = np.empty((panels, d, WIDE), np.float32), np.empty((panels, d, WIDE), np.float32)
    for unit in range(q.shape[0]):
        k, v, kt = split_rows(keys[unit]), split_rows(values[unit]), split_rows(keys_t[unit])
        total_k[:], total_v[:] = np.float32(0), np.float32(0)
        for head in range(heads):
            all_ps[:], all_gradients[:] = np.uint16(0), np.uint16(0)
            for first in range(0, s, WIDE):
                last = min(first + WIDE, s)
                whole = (last + STEP - 1) // STEP * STEP
                _along(do[unit, head, first:last], o[unit, head, first:last], along)
                for i in range(last - first):
                    most[i], part[i] = top[unit, head, first + i], inverse[unit, head, first + i]
                _products(k, _queries(q[unit, head], first, last), first, last, kept, scores)
                _products(v, _queries(do_t[unit, head], first, last), first, last, kept, slopes)
                gradients[last:whole] = 0
                for j in range(last):
                    p_bits, ds_bits = ps[j], gradients[j]
                    for i in range(WIDE):
                        e = _exponential(scores[j, i], scale, most[i])
                        p = e * part[i] if j <= first + i else np.float32(0)
                        ds = (slopes[j, i] - along[i]) * p if j <= first + i else np.float32(0)
                        p_bits[i], ds_bits[i] = np.uint16(_bf16(p)), np.uint16(_bf16(ds))
                for j in range(last):
                    for i in range(last - first):
                        all_ps[j // WIDE, first + i, j % WIDE] = ps[j, i]
                        all_gradients[j // WIDE, first + i, j % WIDE] = gradients[j, i]
                _over_keys(kt, gradients[:whole], first, last, kept, sums)
                for c in range(d):
                    for i in range(last - first):
                        dq[unit, head, c, first + i] = np.uint16(_bf16(sums[c, i] * scale_of_gradients))
            x, y = split_rows(q[unit, head]), split_rows(do_t[unit, head])
            for panel in range(panels):
                start = panel * WIDE
                _over_queries(x, all_gradients[panel, start:], start, kept, sums)
                _add(sums, total_k[panel])  # of the first head 0 + x: sums are never -0
                _over_queries(y, all_ps[panel, start:], start, kept, sums)
                _add(sums, total_v[panel])
        for j in range(s):
            for c in range(d):
                dk[unit, c, j] = np.uint16(_bf16(total_k[j // WIDE, c, j % WIDE] * scale_of_gradients))
                dv[unit, c, j] = np.uint16(_bf16(total_v[j // WIDE, c, j % WIDE]))
