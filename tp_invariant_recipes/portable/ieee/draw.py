"""Draw tokens by their log-probabilities in stated integer and IEEE fp32 arithmetic: every machine draws the same ones.

    order    of tokens: by log-probability, the greatest first, then by token id
    weight   exp((log-probability - highest) / temperature), fp32; 1 of the first token
    top-k    the first k tokens
    top-p    of these, the first ones that have at least p of their mass, which is the weight in whole units of 2^-40;
             sums of whole numbers have no order. p times the mass is one fp64 product
    race     every token waits for a time that is exponentially distributed: -log(1 - v), v = (word + 1/2) / 2^32; the
             token of the greatest weight / time wins, of equals the least id
    word     of token i, by Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): word
             (i % 4096) // 1024 of the block with the key of the request and the counter (1024 (i // 4096) + i % 1024,
             sample, position, 0)

A race needs no sum over the vocabulary: the winner is token i with a probability of weight i over all weights.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numba import njit
from torch import Tensor

from tp_invariant_recipes.kernels.cpu.numba_loop import OPTIONS, cpu_loop
from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.portable.ieee.math import HALF, ONE_FP32, ZERO, exp, fp32_of_small, log
from tp_invariant_recipes.portable.one_source import (
    UNFUSED,
    bits_of,
    constant,
    elementwise,
    fill,
    numba_version,
)

DEFINITION = 1  # of the tokens that are drawn
QUARTER, GROUP = tl.constexpr(1024), tl.constexpr(4096)  # tokens of one word of a block, and of all four
BLOCK = 4096  # tokens that a program of `kept` reads at a time
PROGRAMS = 264  # of a race, at least: two for each SM of an H100
TWO_16, TWO_M32 = constant(2.0**16), constant(2.0**-32)
BELOW_ONE = constant(1 - 2.0**-24)
UNIT = tl.constexpr(2.0**40)
LEAST, MOST = tl.constexpr(-(1 << 31)), tl.constexpr((1 << 31) - 1)
NOBODY = tl.constexpr(-(1 << 63))


def kept(
    scores: Tensor, highest: Tensor, do_sample: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """Return the last token in order that top-k and top-p leave: its `order_key`, and its id; int32 [rows, 2].

    scores: [rows, vocab] fp32, contiguous. highest, temperature: [rows] fp32. do_sample, top_k: [rows] int32; without
    draws, and with k = 0 and p = 1, all stay. top_p: [rows] fp64.
    """
    out = torch.empty(len(scores), 2, dtype=torch.int32, device=scores.device)
    tensors = _dense(scores, highest, do_sample, temperature, top_k, top_p, out)
    fill(kept_triton, _kept_loop, tensors, work=scores.numel())
    return out


def race(
    scores: Tensor, highest: Tensor, do_sample: Tensor, temperature: Tensor, keys: Tensor, limits: Tensor
) -> Tensor:
    """Find the winning token of each row, or without draws the first in order: int64 [rows]; -1: none stays.

    keys: [rows, 3] int64: of the request, sample, position. limits: as of `kept`. All else: as `kept` has it.
    """
    groups = triton.cdiv(scores.shape[1], GROUP.value)
    parts = min(groups, triton.cdiv(PROGRAMS, len(scores))) if scores.is_cuda else 1
    best = torch.empty(len(scores), parts, dtype=torch.int64, device=scores.device)
    tensors = _dense(scores, highest, do_sample, temperature, keys, limits, best)
    fill(race_triton, _race_loop, tensors, work=scores.numel())
    winner = best.amax(1)
    return torch.where(winner == NOBODY.value, -1, MOST.value - (winner & 0xFFFFFFFF))


def _dense(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Make each dense, as kernels take it; a column of a table of parameters is not."""
    return tuple(tensor.contiguous() for tensor in tensors)


@elementwise
def order_key(x):
    """int32, rising with x; both zeros have one."""
    bits = bits_of(x + ZERO)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@elementwise
def weight(x, highest, temperature):
    """At most 1."""
    return exp(tl.div_rn(x - highest, temperature))


@elementwise
def waiting_time(word):
    """-log(1 - v) for v = (word + 1/2) / 2^32, of 32 random bits; at least 2^-33, at most 16.7.

    log(1 - v) is multiplied by v / (1 - rounded(1 - v)), which takes off what rounding 1 - v has added (Kahan).
    """
    v = (fp32_of_small((word >> 16) & 0xFFFF) * TWO_16 + (fp32_of_small(word & 0xFFFF) + HALF)) * TWO_M32
    v = tl.where(v > BELOW_ONE, BELOW_ONE, v)
    rest = ONE_FP32 - v
    return tl.where(rest == ONE_FP32, v, tl.div_rn((ZERO - log(rest)) * v, ONE_FP32 - rest))


@elementwise
def result_bits(x, highest, temperature, word):
    """Return the bits of weight / time, which rise with it."""
    return bits_of(tl.div_rn(weight(x, highest, temperature), waiting_time(word)))


_order_key, _weight, _result_bits = (numba_version(name) for name in ("order_key", "weight", "result_bits"))


# --- a CPU ---


@njit(**OPTIONS)
def _mass_numba(x: Any, highest: Any, temperature: Any) -> Any:
    return np.int64(np.float64(_weight(x, highest, temperature)) * 1099511627776.0)


@njit(**OPTIONS)
def _limit(orders: Any, masses: Any, need: int, out: Any) -> None:
    """Fill out with key and id of the token in order with which the masses reach `need`."""
    key = np.int64(-2147483648)
    for bit in range(31, -1, -1):
        trial, mass = key + (np.int64(1) << bit), np.int64(0)
        for i in range(orders.size):
            mass += masses[i] if orders[i] >= trial else 0
        if mass >= need:
            key = trial
    for i in range(orders.size):
        need -= masses[i] if orders[i] > key else 0
    last = 0
    while last < orders.size - 1:
        need -= masses[last] if orders[last] == key else 0
        if need <= 0:
            break
        last += 1
    out[0], out[1] = key, last


@cpu_loop
def _kept_loop(scores: Any, highest: Any, do_sample: Any, temperature: Any, top_k: Any, top_p: Any, out: Any) -> None:
    size = scores.shape[1]
    orders, masses = np.empty(size, np.int64), np.ones(size, np.int64)
    for row in range(scores.shape[0]):
        out[row, 0], out[row, 1] = -2147483648, 2147483647
        by_k, by_p = 0 < top_k[row] < size, top_p[row] < 1
        if not do_sample[row] or not (by_k or by_p):
            continue
        for i in range(size):
            orders[i] = _order_key(scores[row, i])
        if by_k:
            masses[:] = 1
            _limit(orders, masses, top_k[row], out[row])
        if by_p:
            total = np.int64(0)
            for i in range(size):
                inside = orders[i] > out[row, 0] or (orders[i] == out[row, 0] and i <= out[row, 1])
                masses[i] = _mass_numba(scores[row, i], highest[row], temperature[row]) if inside else 0
                total += masses[i]
            product = np.float64(total) * top_p[row]
            need = np.int64(product)
            _limit(orders, masses, need + (np.float64(need) < product), out[row])


@njit(**OPTIONS)
def _philox_numba(key: Any, c0: Any, c1: Any, c2: Any, words: Any) -> None:
    """Fill words [4] uint64 with one block of Philox4x32-10."""
    mask = np.uint64(0xFFFFFFFF)
    k0, k1 = key & mask, key >> np.uint64(32)
    c3 = np.uint64(0)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> np.uint64(32)) ^ c1 ^ k0, b & mask, (a >> np.uint64(32)) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    words[0], words[1], words[2], words[3] = c0, c1, c2, c3


@cpu_loop
def _race_loop(scores: Any, highest: Any, do_sample: Any, temperature: Any, keys: Any, limits: Any, out: Any) -> None:
    size = scores.shape[1]
    words = np.empty((1024, 4), np.uint64)
    for row in range(scores.shape[0]):
        best = np.int64(-9223372036854775808)
        key, c1, c2 = np.uint64(keys[row, 0]), np.uint64(keys[row, 1]), np.uint64(keys[row, 2])
        for group in range((size + 4095) // 4096):
            if do_sample[row]:
                for i in range(min(1024, size - group * 4096)):
                    _philox_numba(key, np.uint64(group * 1024 + i), c1, c2, words[i])
            for token in range(group * 4096, min(size, group * 4096 + 4096)):
                x = scores[row, token]
                order = _order_key(x)
                if order > limits[row, 0] or (order == limits[row, 0] and token <= limits[row, 1]):
                    value = np.int64(order)
                    if do_sample[row]:
                        word = words[token % 1024, token % 4096 // 1024]
                        value = np.int64(_result_bits(x, highest[row], temperature[row], np.int64(word)))
                    best = max(best, (value << 32) | np.int64(2147483647 - token))
        out[row, 0] = best


# --- Triton ---


def kept_triton(
    scores: Tensor, highest: Tensor, do_sample: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, out: Tensor
) -> None:
    """Fill out. All contiguous; Triton's interpreter takes CPU tensors."""
    rows, size = scores.shape
    tensors = (scores, highest, do_sample, temperature, top_k, top_p, out)
    KEPT.launch((rows, 1), tensors, (size,), (BLOCK,), 16)


def race_triton(
    scores: Tensor, highest: Tensor, do_sample: Tensor, temperature: Tensor, keys: Tensor, limits: Tensor, out: Tensor
) -> None:
    """Fill out, [rows, parts]. All contiguous; Triton's interpreter takes CPU tensors."""
    rows, size = scores.shape
    tensors = (scores, highest, do_sample, temperature, keys, limits, out)
    RACE.launch((rows, out.shape[1]), tensors, (size, out.shape[1]), (), 8)


@triton.jit
def _mass_of(
    scores, size, highest, temperature, least, most, end, key, last, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the mass, or the number, of tokens with a key from `least` to `most` and an id below `end`.

    Of those of `key` only up to the token `last`, and of smaller keys none.
    """
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(scores + token, mask=token < size, other=0.0)
        order = order_key(x)
        inside = (token < size) & (token < end) & (order >= least) & (order <= most)
        inside &= (order > key) | ((order == key) & (token <= last))
        if BY_MASS:
            mass = (weight(x, highest, temperature).to(tl.float64) * UNIT).to(tl.int64)
            total += tl.where(inside, mass, 0)
        else:
            total += inside.to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def _limit_triton(scores, size, highest, temperature, need, key, last, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Key and id of the token in order with which masses, of tokens up to `key` and `last`, reach `need`."""
    least = key * 0 + LEAST
    one_bit = key * 0 + 1
    for i in range(32):
        trial = least ^ (one_bit << (31 - i))
        mass = _mass_of(scores, size, highest, temperature, trial, MOST, size, key, last, BY_MASS, BLOCK)
        least = tl.where(mass >= need, trial, least)
    if least < MOST:
        need -= _mass_of(scores, size, highest, temperature, least + 1, MOST, size, key, last, BY_MASS, BLOCK)
    low = key * 0
    high = low + size - 1
    while low < high:
        middle = (low + high) // 2
        mass = _mass_of(scores, size, highest, temperature, least, least, middle + 1, key, last, BY_MASS, BLOCK)
        high = tl.where(mass >= need, middle, high)
        low = tl.where(mass >= need, low, middle + 1)
    return least, low


@triton.jit(do_not_specialize=["size"])
def _ieee_kept(
    scores, highest, do_sample, temperature, top_k, top_p, out,
    size, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    scores += row.to(tl.int64) * size
    top, heat = tl.load(highest + row), tl.load(temperature + row)
    k, p, draws = tl.load(top_k + row), tl.load(top_p + row), tl.load(do_sample + row) != 0
    key = k * 0 + LEAST
    last = k * 0 + MOST
    if draws & (k > 0) & (k < size):
        key, last = _limit_triton(scores, size, top, heat, k.to(tl.int64), key, last, False, BLOCK)
    if draws & (p < 1.0):
        total = _mass_of(scores, size, top, heat, LEAST, MOST, size, key, last, True, BLOCK)
        product = total.to(tl.float64) * p
        need = product.to(tl.int64)
        need += (need.to(tl.float64) < product).to(tl.int64)
        key, last = _limit_triton(scores, size, top, heat, need, key, last, True, BLOCK)
    tl.store(out + 2 * row, key)
    tl.store(out + 2 * row + 1, last)


@triton.jit
def _entry(scores, token, size, value, order, limit, last):
    """Value and token in one number, of which the greatest wins. token ^ MOST is MOST - token."""
    inside = (token < size) & ((order > limit) | ((order == limit) & (token <= last)))
    return tl.where(inside, (value.to(tl.int64) << 32) | (token ^ MOST).to(tl.int64), NOBODY)


@triton.jit(do_not_specialize=["size", "parts"])
def _ieee_race(scores, highest, do_sample, temperature, keys, limits, out, size, parts):
    row, part = tl.program_id(0), tl.program_id(1)
    scores += row.to(tl.int64) * size
    top, heat, draws = tl.load(highest + row), tl.load(temperature + row), tl.load(do_sample + row)
    limit, last = tl.load(limits + 2 * row), tl.load(limits + 2 * row + 1)
    key = tl.load(keys + 3 * row)
    sample, position = tl.load(keys + 3 * row + 1).to(tl.int32), tl.load(keys + 3 * row + 2).to(tl.int32)
    best = tl.full([QUARTER], NOBODY, tl.int64)
    column = tl.arange(0, QUARTER)
    for group in range(part, tl.cdiv(size, GROUP), parts):
        first = group * GROUP + column
        if draws != 0:
            counter = group * QUARTER + column
            words = tl.philox(key, counter, counter * 0 + sample, counter * 0 + position, counter * 0)
            for lane in tl.static_range(4):
                token = first + lane * QUARTER
                x = tl.load(scores + token, mask=token < size, other=0.0)
                value = result_bits(x, top, heat, words[lane].to(tl.int32, bitcast=True))
                best = tl.maximum(best, _entry(scores, token, size, value, order_key(x), limit, last))
        else:
            for lane in tl.static_range(4):
                token = first + lane * QUARTER
                order = order_key(tl.load(scores + token, mask=token < size, other=0.0))
                best = tl.maximum(best, _entry(scores, token, size, order, order, limit, last))
    tl.store(out + row * parts + part, tl.max(best, 0))


KEPT, RACE = Kernel(_ieee_kept, **UNFUSED), Kernel(_ieee_race, **UNFUSED)
