# SPDX-License-Identifier: Apache-2.0
"""Draw tokens by their log-probabilities in stated integer and IEEE fp32 arithmetic: every machine draws the same ones.

    order    of tokens: by log-probability, the greatest first, then by token id
    weight   exp((log-probability - highest) / temperature), fp32; 1 of the first token
    top-k    the first k tokens, and all that are as probable as the k-th
    top-p    of these, the first ones that have at least p of their mass, which is the weight in whole units of 2^-40;
             sums of whole numbers have no order. p times the mass is one fp64 product
    race     every token waits for a time that is exponentially distributed: -log(1 - v), v = (word + 1/2) / 2^32; the
             token of the greatest weight / time wins, of equals the least id
    word     of token i, by Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): word
             (i % 4096) // 1024 of the block with the key of the request and the counter (1024 (i // 4096) + i % 1024,
             sample, position, 0)

A race needs no sum over the vocabulary: the winner is token i with a probability of weight i over all weights.

A GPU sorts nothing. top-k and top-p leave the first tokens in order, so a winner is the winner of those that are left
if the tokens before it have less than the mass that is asked for. Else no token from it on is left, and the race is run
again among those before it.
"""

import hashlib
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
from tp_invariant_recipes.portable.shared_source import (
    UNFUSED,
    as_array,
    bits_of,
    by_rows,
    constant,
    elementwise,
    fill,
    numba_version,
)

DEFINITION = 2  # of the tokens that are drawn
QUARTER, GROUP = tl.constexpr(1024), tl.constexpr(4096)  # tokens of one word of a block, and of all four
PROGRAMS = 1056  # of a race, at least: eight for each SM of an H100, one after the other
WARPS = 32  # of a program: with fewer a thread has more numbers, and registers keep other programs off its SM
TWO_16, TWO_M32 = constant(2.0**16), constant(2.0**-32)
BELOW_ONE = constant(1 - 2.0**-24)
UNIT = 2.0**40
UNIT_FP32 = constant(UNIT)
RUN = 64  # numbers of a run, of which a GPU takes the greatest
FULL = 1 << 31  # no row's top_k is above it
MOST = tl.constexpr((1 << 31) - 1)
UNLIMITED = tl.constexpr(-(1 << 31))  # an order that all tokens are after
NOBODY = tl.constexpr(-(1 << 63))


def request_key(seed: int, request: str) -> int:
    """Return the key of a request's random numbers, as an int64: a hash of 64 bits of its seed and id."""
    name = f"{seed} {request}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)


def draw(log_probabilities: Tensor, keys: Tensor, numbers: Tensor, *, limits: int | None = FULL) -> Tensor:
    """Draw a token of each row; -1 where a log-probability is NaN or +inf, or all are -inf. It waits for no GPU.

    log_probabilities: [R, V] fp32, contiguous. keys: [R, 3] int64: request_key, sample, position in the completion.
    numbers: [R, 4] fp64: do_sample, temperature, top_k, top_p.
    limits:  None: no row has top-k or top-p; else no row's top_k is above it.
    returns: [R] int64, the same on every machine.
    """
    highest = log_probabilities.amax(-1)
    do_sample, temperature = numbers[:, 0].int(), numbers[:, 1].float()
    limited = limits is not None and not log_probabilities.is_cuda
    bounds = kept(log_probabilities, highest, numbers) if limited else torch.empty_like(keys[:, :2], dtype=torch.int32)
    if not limited:
        bounds[:, 0], bounds[:, 1] = UNLIMITED.value, MOST.value
    if limits and not limited:
        values = greatest(log_probabilities, min(limits, log_probabilities.shape[1])) + 0.0
        last = values.gather(1, (numbers[:, 2:3].long() - 1).clamp(0, values.shape[1] - 1)).view(torch.int32).squeeze(1)
        cuts = (do_sample > 0) & (numbers[:, 2] > 0)
        bounds[:, 0] = torch.where(cuts, last ^ ((last >> 31) & 0x7FFFFFFF), bounds[:, 0])
    operands = log_probabilities, highest, do_sample, temperature, keys.contiguous(), bounds
    best = race(*operands)
    if limits is not None and not limited:
        best = _within(operands, numbers[:, 3], best)
    tokens = torch.where(best == NOBODY.value, -1, MOST.value - (best & 0xFFFFFFFF))
    return torch.where(torch.isfinite(highest), tokens, -1)


def greatest(scores: Tensor, count: int) -> Tensor:
    """Return the `count` greatest of each row in order: [rows, count].

    They are in the `count` runs of RUN numbers whose own greatest ones are the greatest: other runs have none greater.
    """
    size = scores.shape[1]
    if size < 4 * RUN * count:
        return scores.topk(count).values
    if size % RUN:
        scores = torch.nn.functional.pad(scores, (0, -size % RUN), value=-torch.inf)
    runs = scores.unflatten(1, (-1, RUN))
    chosen = runs.amax(2).topk(count, sorted=False).indices
    return runs.gather(1, chosen.unsqueeze(2).expand(-1, -1, RUN)).flatten(1).topk(count).values


def _within(operands: tuple[Tensor, ...], top_p: Tensor, best: Tensor) -> Tensor:
    """Return the winners within top-p, given those without it, as of `race`; on a GPU."""
    scores, highest, do_sample, temperature, _, bounds = operands
    parts = min(triton.cdiv(scores.shape[1], GROUP.value), triton.cdiv(PROGRAMS, len(scores)))
    masses = torch.empty(len(scores), parts, 2, dtype=torch.int64, device=scores.device)
    before_triton(scores, highest, temperature, bounds, best, masses)
    total, before = masses.sum(1).unbind(1)
    needed = (total.double() * top_p).ceil().long()
    beyond = (do_sample > 0) & (top_p < 1) & (before >= needed) & torch.isfinite(highest)
    again_triton(operands, torch.where(beyond, needed, 0), best)
    return best


def kept(scores: Tensor, highest: Tensor, numbers: Tensor) -> Tensor:
    """Return the last token in order that top-k and top-p leave, on a CPU: its `order_key` and its id, int32 [rows, 2].

    scores: [rows, vocab] fp32, contiguous. highest: [rows] fp32. numbers: as of `draw`; without draws all stay.
    """
    size, (do_sample, temperature, top_k, top_p) = scores.shape[1], numbers.unsqueeze(2).unbind(1)
    bits = (scores + 0.0).view(torch.int32)
    order, tokens = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).sort(descending=True, stable=True)
    count = torch.where((do_sample > 0) & (top_k > 0), top_k.clamp(max=size), size).long()
    count = (order >= order.gather(1, count - 1)).sum(1, keepdim=True)
    weights = torch.empty_like(scores)
    arrays = tuple(map(as_array, (scores, highest, temperature.float().flatten(), weights)))
    by_rows(_weights_loop, arrays, work=scores.numel())
    mass = (weights.double() * UNIT).long().gather(1, tokens)
    reached = torch.where(torch.arange(size, device=scores.device) < count, mass, 0).cumsum(1)
    missing = (reached < (reached[:, -1:] * top_p).ceil().long()).sum(1, keepdim=True)
    last = torch.where((do_sample > 0) & (top_p < 1), missing, count - 1).clamp(max=size - 1)
    return torch.cat([order.gather(1, last), tokens.gather(1, last).int()], 1)


def race(
    scores: Tensor, highest: Tensor, do_sample: Tensor, temperature: Tensor, keys: Tensor, limits: Tensor
) -> Tensor:
    """Find the winning token of each row, or without draws the first in order: int64 [rows]; NOBODY: none stays.

    keys: [rows, 3] int64: of the request, sample, position. limits: as of `kept`. All else: as `kept` has it.
    returns: the token in the lower half, as MOST - token.
    """
    groups = triton.cdiv(scores.shape[1], GROUP.value)
    parts = min(groups, triton.cdiv(PROGRAMS, len(scores))) if scores.is_cuda else 1
    best = torch.empty(len(scores), parts, dtype=torch.int64, device=scores.device)
    tensors = scores, highest, do_sample, temperature, keys.contiguous(), limits, best
    fill(race_triton, _race_loop, tensors, work=scores.numel())
    return best.amax(1)


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


_order_key, _weight, _result_bits = map(numba_version, ("order_key", "weight", "result_bits"))


# --- a CPU ---


@cpu_loop
def _weights_loop(scores: Any, highest: Any, temperature: Any, out: Any) -> None:
    for row in range(scores.shape[0]):
        for i in range(scores.shape[1]):
            out[row, i] = _weight(scores[row, i], highest[row], temperature[row])


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


def race_triton(
    scores: Tensor, highest: Tensor, do_sample: Tensor, temperature: Tensor, keys: Tensor, limits: Tensor, out: Tensor
) -> None:
    """Fill out, [rows, parts]. All contiguous; Triton's interpreter takes CPU tensors."""
    rows, size = scores.shape
    tensors = (scores, highest, do_sample, temperature, keys, limits, out)
    RACE.launch((rows, out.shape[1]), tensors, (size, out.shape[1]), (), WARPS)


@triton.jit
def _entry(token, size, value, order, limit, last):
    """Value and token in one number, of which the greatest wins. token ^ MOST is MOST - token."""
    inside = (token < size) & ((order > limit) | ((order == limit) & (token <= last)))
    return tl.where(inside, (value.to(tl.int64) << 32) | (token ^ MOST).to(tl.int64), NOBODY)


@triton.jit
def _inside(scores, token, size, limit, last):
    """Whether some of four times QUARTER tokens may win."""
    near = tl.zeros([QUARTER], tl.int32)
    for lane in tl.static_range(4):
        at = token + lane * QUARTER
        order = order_key(tl.load(scores + at, mask=at < size, other=0.0))
        near |= ((at < size) & ((order > limit) | ((order == limit) & (at <= last)))).to(tl.int32)
    return tl.max(near, 0) > 0


@triton.jit
def _winner(scores, top, heat, draws, key, sample, position, limit, last, size, part, parts):
    """Return the best entry of the tokens of a part."""
    best = tl.full([QUARTER], NOBODY, tl.int64)
    column = tl.arange(0, QUARTER)
    for group in range(part, tl.cdiv(size, GROUP), parts):
        first = group * GROUP + column
        if draws != 0:
            near = limit == UNLIMITED
            if limit != UNLIMITED:
                near = _inside(scores, first, size, limit, last)
            if near:
                counter = group * QUARTER + column
                words = tl.philox(key, counter, counter * 0 + sample, counter * 0 + position, counter * 0)
                for lane in tl.static_range(4):
                    token = first + lane * QUARTER
                    x = tl.load(scores + token, mask=token < size, other=0.0)
                    value = result_bits(x, top, heat, words[lane].to(tl.int32, bitcast=True))
                    best = tl.maximum(best, _entry(token, size, value, order_key(x), limit, last))
        else:
            for lane in tl.static_range(4):
                token = first + lane * QUARTER
                order = order_key(tl.load(scores + token, mask=token < size, other=0.0))
                best = tl.maximum(best, _entry(token, size, order, order, limit, last))
    return tl.max(best, 0)


@triton.jit(do_not_specialize=["size", "parts"])
def _ieee_race(scores, highest, do_sample, temperature, keys, limits, out, size, parts):
    row, part = tl.program_id(0), tl.program_id(1)
    top, heat, draws = tl.load(highest + row), tl.load(temperature + row), tl.load(do_sample + row)
    key = tl.load(keys + 3 * row)
    sample, position = tl.load(keys + 3 * row + 1).to(tl.int32), tl.load(keys + 3 * row + 2).to(tl.int32)
    limit, last = tl.load(limits + 2 * row), tl.load(limits + 2 * row + 1)
    scores += row.to(tl.int64) * size
    best = _winner(scores, top, heat, draws, key, sample, position, limit, last, size, part, parts)
    tl.store(out + row * parts + part, best)


# --- top-p on a GPU ---


def before_triton(
    scores: Tensor, highest: Tensor, temperature: Tensor, limits: Tensor, best: Tensor, out: Tensor
) -> None:
    """Fill out [rows, parts, 2] int64: the mass of the tokens within the limits, and of those before the winner."""
    tensors = (scores, highest, temperature, limits, best, out)
    BEFORE.launch((len(scores), out.shape[1]), tensors, (scores.shape[1], out.shape[1]), (), WARPS)


def again_triton(operands: tuple[Tensor, ...], needed: Tensor, best: Tensor) -> None:
    """Race anew in the rows whose `needed` is not 0 until less mass than that is before the winner.

    operands: of `race`. best: changed.
    """
    AGAIN.launch((len(best), 1), (*operands, needed, best), (operands[0].shape[1],), (), WARPS)


@triton.jit
def _masses(scores, top, heat, limit, last, order, token, size, part, parts):
    """Return the mass of a part's tokens within the limits, and of those of them before a token with this order."""
    column = tl.arange(0, GROUP)
    total, before = tl.zeros([GROUP], tl.int64), tl.zeros([GROUP], tl.int64)
    for group in range(part, tl.cdiv(size, GROUP), parts):
        at = group * GROUP + column
        x = tl.load(scores + at, mask=at < size, other=float("-inf"))
        mine = order_key(x)
        mass = tl.where(at < size, (weight(x, top, heat) * UNIT_FP32).to(tl.int64), 0)
        total += tl.where((mine > limit) | ((mine == limit) & (at <= last)), mass, 0)
        before += tl.where((mine > order) | ((mine == order) & (at < token)), mass, 0)
    return tl.sum(total, 0), tl.sum(before, 0)


@triton.jit
def _token_of(best):
    """Return the token of an entry, int32; any of NOBODY."""
    return (best & MOST).to(tl.int32) ^ MOST


@triton.jit(do_not_specialize=["size", "parts"])
def _ieee_before(scores, highest, temperature, limits, best, out, size, parts):
    row, part = tl.program_id(0), tl.program_id(1)
    scores += row.to(tl.int64) * size
    top, heat = tl.load(highest + row), tl.load(temperature + row)
    token = tl.minimum(_token_of(tl.load(best + row)), size - 1)
    order = order_key(tl.load(scores + token))
    limit, last = tl.load(limits + 2 * row), tl.load(limits + 2 * row + 1)
    total, before = _masses(scores, top, heat, limit, last, order, token, size, part, parts)
    tl.store(out + (row * parts + part) * 2, total)
    tl.store(out + (row * parts + part) * 2 + 1, before)


@triton.jit(do_not_specialize=["size"])
def _ieee_again(scores, highest, do_sample, temperature, keys, limits, needed, best, size):
    row = tl.program_id(0)
    need = tl.load(needed + row)
    if need > 0:
        scores += row.to(tl.int64) * size
        top, heat, draws = tl.load(highest + row), tl.load(temperature + row), tl.load(do_sample + row)
        key = tl.load(keys + 3 * row)
        sample, position = tl.load(keys + 3 * row + 1).to(tl.int32), tl.load(keys + 3 * row + 2).to(tl.int32)
        token = _token_of(tl.load(best + row))
        order = order_key(tl.load(scores + token))
        before = need
        while before >= need:
            winner = _winner(scores, top, heat, draws, key, sample, position, order, token - 1, size, 0, 1)
            tl.store(best + row, winner)
            token = _token_of(winner)
            order = order_key(tl.load(scores + token))
            _, before = _masses(scores, top, heat, order, -1, order, token, size, 0, 1)


RACE = Kernel(_ieee_race, **UNFUSED)
BEFORE, AGAIN = Kernel(_ieee_before, **UNFUSED), Kernel(_ieee_again, **UNFUSED)
