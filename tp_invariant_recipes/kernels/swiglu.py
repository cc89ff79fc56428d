"""SwiGLU of bf16 or fp32 numbers on a GPU, with the bits that torch's compiler gives Megatron's functions: in fp32,
rounded once.

Importing that compiler and compiling the two functions takes each rank some seconds of its start.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from tp_invariant_recipes.kernels.launch import Kernel

BLOCK = 1024  # features of a row that a program computes
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up: [rows, 2f], [gate | up] without gaps → [rows, f]."""
    features = x.shape[1] // 2
    y = x.new_empty(x.shape[0], features)
    if y.numel():
        FORWARD.launch((len(x), triton.cdiv(features, BLOCK)), (x, y), (), (features, BLOCK))
    return y


def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x. dy: [rows, f] without gaps, of x's dtype."""
    features, dx = dy.shape[1], torch.empty_like(x)
    if dy.numel():
        BACKWARD.launch((len(x), triton.cdiv(features, BLOCK)), (dy, x, dx), (), (features, BLOCK))
    return dx


@triton.jit
def _silu(x):
    """x · σ(x), as the compiler writes it."""
    return x / (1.0 + (tl.exp(-x) if _INTERPRETED else libdevice.exp(-x)))


@triton.jit
def _forward(x, y, F: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, gates = column < F, x + row * 2 * F + column
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + F, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * F + column, (_silu(gate) * up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(dy, x, dx, F: tl.constexpr, BLOCK: tl.constexpr):
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


FORWARD, BACKWARD = Kernel(_forward), Kernel(_backward)
