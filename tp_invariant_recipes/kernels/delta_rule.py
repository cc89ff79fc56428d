# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of numerics/layers/delta_net.py on a GPU, forward and backward: kernels for all heads at once.

Of one head and a chunk of 64 tokens, with unit keys k, unit queries q / sqrt(key), and p[i] = g[0] + … + g[i]:

    M[i, j] = exp(p[i] - p[j]), j <= i      A = β (k kᵀ) M, j < i      B = (q kᵀ) M      T = (I + A)^-1
    R = β (v - exp(p) k S)                  N = T R                    o = exp(p) q S + B N
    S' = exp(p[63]) S + kᵀ exp(p[63] - p) N, the next chunk's state

    dN = Bᵀ do + exp(p[63] - p) k dS'       dR = Tᵀ dN                 dA = -dR Nᵀ       dB = do Nᵀ
    dS = exp(p[63]) dS' + qᵀ exp(p) do - kᵀ β exp(p) dR

Only S and dS pass from chunk to chunk; their columns are independent, so a program takes some of them through all
chunks. Every other program takes one chunk. A tile is computed by the same instructions over k in order, in fp32 and
without atomics, and nothing is compiled for the number of heads that a launch has. So the bits of a head are its own.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.launch import Kernel

CHUNK = 64  # as Megatron-Core's torch_chunk_gated_delta_rule
EPSILON = 1e-6  # of the norms of queries and keys
# [Columns of a program,] warps, stages: part of the definition; about the fastest of ten on an H100 with 128 features.
PASSED, OUTPUT, SYSTEM, WHOLE = (16, 4, 3), (64, 4, 2), (4, 2), (8, 2)


class Heads(NamedTuple):
    """Of one shard: groups of heads, which share keys and queries; heads; features of a key and of a value."""

    groups: int
    heads: int
    key: int
    value: int


def delta_rule_forward(x: Tensor, decay: Tensor, strength: Tensor, sizes: Heads) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the rule with g = decay and β = strength.

    x:       [n, s, b, q | k | v] of n shards, contiguous; q, k: [groups · key], v: [heads · value].
    decay, strength: [n, s, b, heads] fp32, contiguous.
    returns: [n, s, b, heads · value] of x's dtype, rounded once; and of chunks q, k, numbers, T, B, N, S, fp32, zeros
             where tiles have no tokens and features. Numbers are p, β, exp(p), exp(p[63] - p) and β exp(p).
    """
    if not (x.is_contiguous() and decay.is_contiguous() and strength.is_contiguous()):
        raise ValueError("the tokens of the gated delta rule lie one after the other")
    shards, size, batch, _ = x.shape
    *_, features, width = constants = _constants(sizes)
    groups, rows = (shards * batch * count * triton.cdiv(size, CHUNK) for count in (sizes.groups, sizes.heads))
    empty = partial(torch.empty, dtype=torch.float32, device=x.device)
    q, k = empty(2, groups, CHUNK, features)
    solved, within = empty(2, rows, CHUNK, CHUNK)
    numbers, new, states = empty(rows, 5, CHUNK), empty(rows, CHUNK, width), empty(rows, features, width)
    y = x.new_empty(shards, size, batch, sizes.heads * sizes.value)
    tensors, counts = (x, decay, strength, q, k, numbers, solved, within), (size, batch)
    SYSTEMS.launch((groups, 1), tensors, counts, constants, *SYSTEM)
    units = shards * batch * sizes.heads
    _by_columns(STATES, units, (x, k, numbers, solved, new, states), counts, constants, *PASSED)
    _by_columns(OUTPUTS, rows, (q, numbers, within, new, states, y), counts, constants, *OUTPUT)
    return y, (q, k, numbers, solved, within, new, states)


def delta_rule_backward(
    dy: Tensor, x: Tensor, decay: Tensor, strength: Tensor, sizes: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, decay and strength. dy: of delta_rule_forward's result, of its shape."""
    _, (q, k, numbers, solved, within, new, states) = delta_rule_forward(x, decay, strength, sizes)
    shards, size, batch, _ = x.shape
    constants, padding = _constants(sizes), (0, new.shape[-1] - sizes.value, 0, -size % CHUNK)
    do = F.pad(dy.unflatten(-1, (sizes.heads, -1)).permute(0, 2, 3, 1, 4).float(), padding).contiguous()  # as new
    dx, ddecay, dstrength, dr, dstates = map(torch.empty_like, (x, decay, strength, new, states))
    tensors, units = (do, q, k, numbers, solved, within, dr, dstates, dx), shards * batch * sizes.heads
    _by_columns(STATE_GRADIENTS, units, tensors, (size, batch), constants, *PASSED)
    read = (x, do, q, k, numbers, solved, within, new, dr, states, dstates)
    GRADIENTS.launch((len(k), 1), (*read, dx, ddecay, dstrength), (size, batch), constants, *WHOLE)
    return dx, ddecay, dstrength


def _constants(sizes: Heads) -> tuple[int, ...]:
    """Return GROUPS, HEADS, KEY, VALUE, FEATURES, WIDTH: the last two are those of tiles."""
    columns = max(PASSED[0], OUTPUT[0])
    return *sizes, max(16, triton.next_power_of_2(sizes.key)), max(columns, triton.next_power_of_2(sizes.value))


def _by_columns(kernel: Kernel, rows: int, tensors: Any, counts: Any, constants: Any, columns: int, *how: int) -> None:
    kernel.launch((rows, constants[-1] // columns), tensors, counts, (*constants, columns), *how)


C, EPS = tl.constexpr(CHUNK), tl.constexpr(EPSILON)
P, BETA, UP, DOWN, STRONGER = (tl.constexpr(row * CHUNK) for row in range(5))  # of the numbers of a chunk


@triton.jit
def _added(
    total, a, b,
    A_ROW: tl.constexpr, A_COLUMN: tl.constexpr, B_ROW: tl.constexpr, B_COLUMN: tl.constexpr, K: tl.constexpr,
    scale=None,
):  # fmt: skip
    """total + a @ b, over k in order; row k of b is multiplied by scale[k] before. a, b: where they begin."""
    step: tl.constexpr = 32 if K > 32 else K
    row, column, i = tl.arange(0, total.shape[0]), tl.arange(0, total.shape[1]), tl.arange(0, step)
    for done in range(0, K, step):
        k = done + i
        x = tl.load(a + (row[:, None] * A_ROW + k[None, :] * A_COLUMN))
        y = tl.load(b + (k[:, None] * B_ROW + column[None, :] * B_COLUMN))
        if scale is not None:
            y *= tl.load(scale + k)[:, None]
        total = tl.dot(x, y, total, input_precision="ieee")
    return total


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros((ROWS, COLUMNS), dtype=tl.float32)


@triton.jit
def _at(ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """Return the places of a tile of ROWS × COLUMNS in rows of STEP numbers."""
    return tl.arange(0, ROWS)[:, None] * STEP + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _of_chunk(number, size, batch, PARTS: tl.constexpr):
    """Of a chunk, counted over shards, samples and parts: part, tokens as rows of x, and which of them exist."""
    chunks = tl.cdiv(size, C)
    pair, part = number // chunks // PARTS, number // chunks % PARTS
    token = number % chunks * C + tl.arange(0, C)
    return part, (pair // batch * size + token) * batch + pair % batch, token < size


@triton.jit
def _of_x(token, exists, first, column, FEATURES: tl.constexpr, WIDTH: tl.constexpr):
    """Return the places of a head's features in rows of WIDTH numbers, and which of them exist."""
    return (token * WIDTH + first)[:, None] + column[None, :], exists[:, None] & (column < FEATURES)[None, :]


@triton.jit
def _of_values(
    token, exists, head, column, GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr
):  # fmt: skip
    """`_of_x` of a head's values, which stand behind all queries and keys."""
    first: tl.constexpr = 2 * GROUPS * KEY
    return _of_x(token, exists, first + head * VALUE, column, VALUE, first + HEADS * VALUE)


@triton.jit
def _group_of(number, size, SHARE: tl.constexpr):
    """Return the chunk of a group with the queries and keys of a head's chunk."""
    chunks = tl.cdiv(size, C)
    return number // chunks // SHARE * chunks + number % chunks


@triton.jit
def _between(p):
    """M."""
    i = tl.arange(0, C)
    return tl.exp(tl.where(i[:, None] >= i[None, :], p[:, None] - p[None, :], float("-inf")))


@triton.jit
def _inverse_of_norm(x):
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, 1) + EPS))[:, None]


@triton.jit
def _through_norm(gradient, x):
    scale = _inverse_of_norm(x)
    return (gradient - x * scale * tl.sum(x * scale * gradient, 1)[:, None]) * scale


@triton.jit(do_not_specialize=["size", "batch"])
def _delta_systems(
    x, decay, strength, q, k, numbers, solved, within, size, batch,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """q and k; of each head of the group its numbers, T and B."""
    number, i, tile = tl.program_id(0).to(tl.int64), tl.arange(0, C), _at(C, FEATURES, FEATURES)
    group, token, exists = _of_chunk(number, size, batch, GROUPS)
    at, inside = _of_x(token, exists, group * KEY, tl.arange(0, FEATURES), KEY, 2 * GROUPS * KEY + HEADS * VALUE)
    q, k = q + number * C * FEATURES, k + number * C * FEATURES
    raw = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(q + tile, raw * (_inverse_of_norm(raw) * KEY**-0.5))
    raw = tl.load(x + at + GROUPS * KEY, mask=inside, other=0.0).to(tl.float32)
    tl.store(k + tile, raw * _inverse_of_norm(raw))
    tl.debug_barrier()
    of_queries = _added(_zeros(C, C), q, k, FEATURES, 1, 1, FEATURES, FEATURES)
    of_keys = _added(_zeros(C, C), k, k, FEATURES, 1, 1, FEATURES, FEATURES)
    chunks = tl.cdiv(size, C)
    share: tl.constexpr = HEADS // GROUPS
    for member in range(share):
        chunk = (number // chunks * share + member) * chunks + number % chunks
        place = token * HEADS + group * share + member
        beta = tl.load(strength + place, mask=exists, other=0.0)
        p = tl.cumsum(tl.load(decay + place, mask=exists, other=0.0), 0)
        last = tl.sum(tl.where(i == C - 1, p, 0.0), 0)
        of_chunk = numbers + chunk * 5 * C + i
        tl.store(of_chunk + P, p)
        tl.store(of_chunk + BETA, beta)
        tl.store(of_chunk + UP, tl.exp(p))
        tl.store(of_chunk + DOWN, tl.exp(last - p))
        tl.store(of_chunk + STRONGER, beta * tl.exp(p))
        between, square = _between(p), chunk * C * C
        tl.store(within + square + _at(C, C, C), of_queries * between)
        a = tl.where(i[:, None] > i[None, :], beta[:, None] * of_keys * between, 0.0)
        tl.store(solved + square + _at(C, C, C), a)
        tl.debug_barrier()
        inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        for row in range(1, C):  # T[row] = I[row] - A[row] T, of which A[row] reads the rows before
            taken = tl.sum(tl.load(solved + square + row * C + i)[:, None] * inverse, 0)
            inverse = tl.where((i == row)[:, None], inverse - taken[None, :], inverse)
        tl.debug_barrier()
        tl.store(solved + square + _at(C, C, C), inverse)


@triton.jit(do_not_specialize=["size", "batch"])
def _delta_states(
    x, k, numbers, solved, new, states, size, batch,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, FEATURES: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """N and S of every chunk of a head, some columns."""
    unit, first, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS, tl.cdiv(size, C)
    i, column, tile = tl.arange(0, C), first + tl.arange(0, COLUMNS), _at(C, COLUMNS, WIDTH)
    of_state = _at(FEATURES, COLUMNS, WIDTH)
    state = states + unit * chunks * FEATURES * WIDTH + first
    tl.store(state + of_state, _zeros(FEATURES, COLUMNS))
    tl.debug_barrier()
    for number in range(unit * chunks, (unit + 1) * chunks):
        head, token, exists = _of_chunk(number, size, batch, HEADS)
        at, inside = _of_values(token, exists, head, column, GROUPS, HEADS, KEY, VALUE)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        keys, of_chunk = k + _group_of(number, size, HEADS // GROUPS) * C * FEATURES, numbers + number * 5 * C
        beta, up = tl.load(of_chunk + BETA + i), tl.load(of_chunk + UP + i)
        old = _added(_zeros(C, COLUMNS), keys, state, FEATURES, 1, WIDTH, 1, FEATURES)
        n = new + number * C * WIDTH + first
        tl.store(n + tile, beta[:, None] * (v - up[:, None] * old))
        tl.debug_barrier()
        solution = _added(_zeros(C, COLUMNS), solved + number * C * C, n, C, 1, WIDTH, 1, C)
        tl.debug_barrier()
        tl.store(n + tile, solution)
        tl.debug_barrier()
        if number + 1 < (unit + 1) * chunks:
            kept = tl.load(state + of_state) * tl.load(of_chunk + UP + C - 1)
            state += FEATURES * WIDTH
            added = _added(_zeros(FEATURES, COLUMNS), keys, n, 1, FEATURES, WIDTH, 1, C, of_chunk + DOWN)
            tl.store(state + of_state, kept + added)
            tl.debug_barrier()


@triton.jit(do_not_specialize=["size", "batch"])
def _delta_outputs(
    q, numbers, within, new, states, y, size, batch,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, FEATURES: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """o of a chunk of a head, some columns."""
    number, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    queries = q + _group_of(number, size, HEADS // GROUPS) * C * FEATURES
    state, n = states + number * FEATURES * WIDTH + first, new + number * C * WIDTH + first
    up = tl.load(numbers + number * 5 * C + UP + tl.arange(0, C))
    output = up[:, None] * _added(_zeros(C, COLUMNS), queries, state, FEATURES, 1, WIDTH, 1, FEATURES)
    output = _added(output, within + number * C * C, n, C, 1, WIDTH, 1, C)
    head, token, exists = _of_chunk(number, size, batch, HEADS)
    at, inside = _of_x(token, exists, head * VALUE, first + tl.arange(0, COLUMNS), VALUE, HEADS * VALUE)
    tl.store(y + at, output.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["size", "batch"])
def _delta_state_gradients(
    do, q, k, numbers, solved, within, dr, dstates, dx, size, batch,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, FEATURES: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dR and dS' of every chunk of a head, and v's gradient in dx; some columns."""
    unit, first, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS, tl.cdiv(size, C)
    i, column, tile = tl.arange(0, C), first + tl.arange(0, COLUMNS), _at(C, COLUMNS, WIDTH)
    of_state = _at(FEATURES, COLUMNS, WIDTH)
    state = dstates + (unit * chunks + chunks - 1) * FEATURES * WIDTH + first
    tl.store(state + of_state, _zeros(FEATURES, COLUMNS))
    tl.debug_barrier()
    for remaining in range(chunks, 0, -1):
        number = unit * chunks + remaining - 1
        of_group, of_chunk = _group_of(number, size, HEADS // GROUPS) * C * FEATURES, numbers + number * 5 * C
        place, square = number * C * WIDTH + first, number * C * C
        beta, down = tl.load(of_chunk + BETA + i), tl.load(of_chunk + DOWN + i)
        gradient = down[:, None] * _added(_zeros(C, COLUMNS), k + of_group, state, FEATURES, 1, WIDTH, 1, FEATURES)
        gradient = _added(gradient, within + square, do + place, 1, C, WIDTH, 1, C)
        tl.store(dr + place + tile, gradient)
        tl.debug_barrier()
        gradient = _added(_zeros(C, COLUMNS), solved + square, dr + place, 1, C, WIDTH, 1, C)
        tl.debug_barrier()
        tl.store(dr + place + tile, gradient)
        tl.debug_barrier()
        head, token, exists = _of_chunk(number, size, batch, HEADS)
        at, inside = _of_values(token, exists, head, column, GROUPS, HEADS, KEY, VALUE)
        tl.store(dx + at, (beta[:, None] * gradient).to(dx.dtype.element_ty), mask=inside)
        if remaining > 1:
            kept = tl.load(state + of_state) * tl.load(of_chunk + UP + C - 1)
            state -= FEATURES * WIDTH
            kept = _added(kept, q + of_group, do + place, 1, FEATURES, WIDTH, 1, C, of_chunk + UP)
            taken = _zeros(FEATURES, COLUMNS)
            taken = _added(taken, k + of_group, dr + place, 1, FEATURES, WIDTH, 1, C, of_chunk + STRONGER)
            tl.store(state + of_state, kept - taken)
            tl.debug_barrier()


@triton.jit(do_not_specialize=["size", "batch"])
def _delta_gradients(
    x, do, q, k, numbers, solved, within, new, dr, states, dstates, dx, ddecay, dstrength, size, batch,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the gradients of a group's chunk: of q and k, over its heads in order, in dx; of each head's decay and β.

    The gradients of k kᵀ and q kᵀ take the places of T and B.
    """
    number, i, tile = tl.program_id(0).to(tl.int64), tl.arange(0, C), _at(C, FEATURES, FEATURES)
    group, token, exists = _of_chunk(number, size, batch, GROUPS)
    q, k, chunks = q + number * C * FEATURES, k + number * C * FEATURES, tl.cdiv(size, C)
    of_x: tl.constexpr = 2 * GROUPS * KEY + HEADS * VALUE
    share: tl.constexpr = HEADS // GROUPS
    dq, dk = _zeros(C, FEATURES), _zeros(C, FEATURES)
    for member in range(share):
        head, chunk = group * share + member, (number // chunks * share + member) * chunks + number % chunks
        place, square, of_state = chunk * C * WIDTH, chunk * C * C, chunk * FEATURES * WIDTH
        of_chunk = numbers + chunk * 5 * C + i
        beta, up, between = tl.load(of_chunk + BETA), tl.load(of_chunk + UP), _between(tl.load(of_chunk + P))
        db = _added(_zeros(C, C), do + place, new + place, WIDTH, 1, 1, WIDTH, WIDTH)
        da = -_added(_zeros(C, C), dr + place, new + place, WIDTH, 1, 1, WIDTH, WIDTH)
        da = tl.where(i[:, None] > i[None, :], da * between, 0.0)
        of_beta = da * _added(_zeros(C, C), k, k, FEATURES, 1, 1, FEATURES, FEATURES)
        weights = db * tl.load(within + square + _at(C, C, C)) + beta[:, None] * of_beta
        tl.debug_barrier()
        tl.store(within + square + _at(C, C, C), db * between)
        tl.store(solved + square + _at(C, C, C), beta[:, None] * da)
        dp, dbeta = tl.sum(weights, 1) - tl.sum(weights, 0), tl.sum(of_beta, 1)
        tl.debug_barrier()
        gradient = up[:, None] * _added(_zeros(C, FEATURES), do + place, states + of_state, WIDTH, 1, 1, WIDTH, WIDTH)
        dp += tl.sum(tl.load(q + tile) * gradient, 1)
        dq = _added(dq + gradient, within + square, k, C, 1, FEATURES, 1, C)
        gradient = _added(_zeros(C, FEATURES), dr + place, states + of_state, WIDTH, 1, 1, WIDTH, WIDTH)
        erased, stronger = tl.sum(tl.load(k + tile) * gradient, 1), tl.load(of_chunk + STRONGER)
        dk -= stronger[:, None] * gradient
        gradient = _added(_zeros(C, FEATURES), new + place, dstates + of_state, WIDTH, 1, 1, WIDTH, WIDTH)
        gradient *= tl.load(of_chunk + DOWN)[:, None]
        added = tl.sum(tl.load(k + tile) * gradient, 1)
        dk = _added(dk + gradient, within + square, q, 1, C, FEATURES, 1, C)
        dk = _added(dk, solved + square, k, C, 1, FEATURES, 1, C)
        dk = _added(dk, solved + square, k, 1, C, FEATURES, 1, C)
        at, inside = _of_values(token, exists, head, tl.arange(0, WIDTH), GROUPS, HEADS, KEY, VALUE)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        dbeta += tl.sum(v * tl.load(dr + place + _at(C, WIDTH, WIDTH)), 1) - up * erased
        tl.store(dstrength + token * HEADS + head, dbeta, mask=exists)
        of_whole = _zeros(16, WIDTH)
        for row in range(0, FEATURES, 16):
            part = of_state + row * WIDTH + _at(16, WIDTH, WIDTH)
            of_whole += tl.load(states + part) * tl.load(dstates + part)
        of_last = tl.sum(added, 0) + tl.load(numbers + chunk * 5 * C + UP + C - 1) * tl.sum(tl.sum(of_whole, 1), 0)
        dp += tl.where(i == C - 1, of_last, 0.0) - stronger * erased - added
        tl.store(ddecay + token * HEADS + head, tl.cumsum(dp, 0, reverse=True), mask=exists)
    at, inside = _of_x(token, exists, group * KEY, tl.arange(0, FEATURES), KEY, of_x)
    gradient = _through_norm(dq * KEY**-0.5, tl.load(x + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=inside)
    at += GROUPS * KEY
    gradient = _through_norm(dk, tl.load(x + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=inside)


SYSTEMS, STATES, OUTPUTS, STATE_GRADIENTS, GRADIENTS = map(
    Kernel, (_delta_systems, _delta_states, _delta_outputs, _delta_state_gradients, _delta_gradients)
)
