# SPDX-License-Identifier: Apache-2.0
"""SwiGLU, and activations weighted by the router's probabilities, with the bits of Megatron's functions.

`swiglu` has the bits that torch's compiler gives Megatron's functions on a GPU: fp32, rounded once. Importing that
compiler and compiling the two functions takes each rank some seconds of its start.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.kernels.row_sums import folding_sum

SWIGLU_BLOCK = 1024  # features of a row that a program computes
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up: [rows, 2f], [gate | up] without gaps → [rows, f]."""
    features = x.shape[1] // 2
    y = x.new_empty(x.shape[0], features)
    if y.numel():
        SWIGLU_FORWARD.launch((len(x), triton.cdiv(features, SWIGLU_BLOCK)), (x, y), (), (features, SWIGLU_BLOCK))
    return y


def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x. dy: [rows, f] without gaps, of x's dtype."""
    features, dx = dy.shape[1], torch.empty_like(x)
    if dy.numel():
        SWIGLU_BACKWARD.launch((len(x), triton.cdiv(features, SWIGLU_BLOCK)), (dy, x, dx), (), (features, SWIGLU_BLOCK))
    return dx


@triton.jit
def _silu(x):
    """x · σ(x), as the compiler writes it."""
    return x / (1.0 + (tl.exp(-x) if _INTERPRETED else libdevice.exp(-x)))


@triton.jit
def _swiglu_forward(x, y, F: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, gates = column < F, x + row * 2 * F + column
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + F, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * F + column, (_silu(gate) * up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(dy, x, dx, F: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, gates = column < F, x + row * 2 * F + column
    grad = tl.load(dy + row * F + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + F, mask=inside, other=0.0).to(tl.float32)
    chance = tl.sigmoid(gate)
    dgate = grad * chance * (gate * (1.0 - chance) + 1.0) * up
    to = dx + row * 2 * F + column
    tl.store(to, dgate.to(dx.dtype.element_ty), mask=inside)
    tl.store(to + F, (grad * _silu(gate)).to(dx.dtype.element_ty), mask=inside)


SWIGLU_FORWARD, SWIGLU_BACKWARD = Kernel(_swiglu_forward), Kernel(_swiglu_backward)


class Clamped(NamedTuple):
    """A gated activation with a factor in the sigmoid, a limit (inf: none) and an offset of the linear half."""

    alpha: float
    limit: float
    offset: float


Kind = str | Clamped


def weighted_activation(x: Tensor, p: Tensor, kind: Kind) -> Tensor:
    """[rows, 2f] for gated kinds, [rows, f] for squared_relu, contiguous, and p [rows] → [rows, f] of x's dtype."""
    return _forward_triton(x, p, kind) if x.is_cuda else _forward_torch(x, p, kind)


def weighted_activation_backward(dy: Tensor, x: Tensor, p: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and p, of their shapes and dtypes. dy: [rows, f] contiguous."""
    return _backward_triton(dy, x, p, kind) if x.is_cuda else _backward_torch(dy, x, p, kind)


def _forward_torch(x: Tensor, p: Tensor, kind: Kind) -> Tensor:
    return (_parts(x.float(), kind)[0] * p.float().unsqueeze(1)).to(x.dtype)


def _forward_triton(x: Tensor, p: Tensor, kind: Kind) -> Tensor:
    y = x.new_empty(x.shape[0], x.shape[1] // (1 if kind == "squared_relu" else 2))
    if y.numel():
        FORWARD.launch((x.shape[0], 1), (x, p.contiguous(), y), (), _constants(y.shape[1], kind))
    return y


def _backward_torch(dy: Tensor, x: Tensor, p: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    act, *slopes = _parts(x.float(), kind)
    wide = dy.float()
    dp = folding_sum(wide * act, -1).to(p.dtype)
    weighted = wide * p.float().unsqueeze(1)
    return torch.cat([weighted * slope for slope in slopes], -1).to(x.dtype), dp


def _backward_triton(dy: Tensor, x: Tensor, p: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    dx, dp = torch.empty_like(x), torch.empty_like(p, memory_format=torch.contiguous_format)
    if dy.numel():
        tensors = (dy, x, p.contiguous(), dx, dp)
        BACKWARD.launch((x.shape[0], 1), tensors, (), _constants(dy.shape[1], kind))
    return dx, dp


def _parts(x: Tensor, kind: Kind) -> tuple[Tensor, ...]:
    """Return the activation, and its derivatives by the two halves of x, or its derivative by x."""
    if kind == "squared_relu":
        positive = x.relu()
        return positive * positive, positive * 2.0
    gate, up = x.chunk(2, -1)
    if isinstance(kind, Clamped):
        return _clamped(gate, up, kind)
    chance = 1.0 / (1.0 + torch.exp(-gate))
    silu = gate * chance
    return silu * up, (chance + silu * (1.0 - chance)) * up, silu


def _clamped(gate: Tensor, up: Tensor, kind: Clamped) -> tuple[Tensor, Tensor, Tensor]:
    low, within = gate <= kind.limit, (up <= kind.limit) & (up >= -kind.limit)
    g = torch.where(gate > kind.limit, kind.limit, gate)
    u = torch.where(up > kind.limit, kind.limit, torch.where(up < -kind.limit, -kind.limit, up)) + kind.offset
    chance = 1.0 / (1.0 + torch.exp(g * -kind.alpha))
    act = g * chance
    dgate = torch.where(low, (chance + act * (1.0 - chance) * kind.alpha) * u, 0.0)
    return act * u, dgate, torch.where(within, act, 0.0)


def _constants(features: int, kind: Kind) -> tuple[int, int, bool, bool, float, float, float]:
    numbers = kind if isinstance(kind, Clamped) else Clamped(1.0, float("inf"), 0.0)
    block = max(128, triton.next_power_of_2(features))
    return features, block, kind != "squared_relu", isinstance(kind, Clamped), *numbers


@triton.jit
def _clamp(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """Return what `_clamped` has: g · σ(α · g), u, and σ. where, not minimum: a NaN stays one."""
    g = tl.where(gate > LIMIT, LIMIT, gate)
    u = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + OFFSET
    chance = 1.0 / (1.0 + tl.exp(g * -ALPHA))
    return g * chance, u, chance


@triton.jit
def _forward(
    x, p, y, F: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < F
    weight = tl.load(p + row).to(tl.float32)
    if GATED:
        gate = tl.load(x + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
        if CLAMPED:
            act, u, _ = _clamp(gate, up, ALPHA, LIMIT, OFFSET)
            act = act * u
        else:
            act = gate / (1.0 + tl.exp(-gate)) * up
    else:
        positive = tl.maximum(tl.load(x + row * F + column, mask=inside, other=0.0).to(tl.float32), 0.0)
        act = positive * positive
    tl.store(y + row * F + column, (act * weight).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dy, x, p, dx, dp, F: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < F
    weight = tl.load(p + row).to(tl.float32)
    grad = tl.load(dy + row * F + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate = tl.load(x + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
        if CLAMPED:
            silu, u, chance = _clamp(gate, up, ALPHA, LIMIT, OFFSET)
            act = silu * u
            slope = tl.where(gate <= LIMIT, (chance + silu * (1.0 - chance) * ALPHA) * u, 0.0)
            silu = tl.where((up <= LIMIT) & (up >= -LIMIT), silu, 0.0)
        else:
            chance = 1.0 / (1.0 + tl.exp(-gate))
            silu = gate * chance
            act = silu * up
            slope = (chance + silu * (1.0 - chance)) * up
        tl.store(dx + row * 2 * F + column, (grad * weight * slope).to(dx.dtype.element_ty), mask=inside)
        tl.store(dx + row * 2 * F + F + column, (grad * weight * silu).to(dx.dtype.element_ty), mask=inside)
    else:
        positive = tl.maximum(tl.load(x + row * F + column, mask=inside, other=0.0).to(tl.float32), 0.0)
        act = positive * positive
        tl.store(dx + row * F + column, (grad * weight * positive * 2.0).to(dx.dtype.element_ty), mask=inside)
    tl.store(dp + row, tl.sum(grad * act, 0).to(dp.dtype.element_ty))


FORWARD = Kernel(_forward)
BACKWARD = Kernel(_backward)
