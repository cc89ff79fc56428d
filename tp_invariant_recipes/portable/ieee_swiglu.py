"""SwiGLU in stated IEEE fp32 arithmetic: a CPU and every GPU give the same bits.

c      = sigmoid(gate)                  every operation in fp32, rounded once (ieee_math.py)
s      = gate c
y      = s up                           rounded once to the output's dtype
dgate  = (dy up) (c + s (1 - c))
dup    = dy s
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.cpu.numba_loop import cpu_loop
from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.portable.ieee_math import ONE, sigmoid
from tp_invariant_recipes.portable.ieee_storage import load_fp32, store_rounded, stored, widened
from tp_invariant_recipes.portable.one_source import UNFUSED, as_array, as_stored, by_rows, elementwise, numba_version

BLOCK = 1024


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up. x: [rows, 2f], gate and up side by side, bf16 or fp32; returns [rows, f] of x's dtype."""
    x = x.contiguous()
    y = x.new_empty(x.shape[0], x.shape[1] // 2)
    if x.is_cuda:
        forward_triton(x, y)
    else:
        by_rows(_forward_loop, (as_array(x), as_array(y)), work=x.numel())
    return y


def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, of its shape and dtype. dy: [rows, f]."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = x.new_empty(x.shape)
    if x.is_cuda:
        backward_triton(dy, x, dx)
    else:
        by_rows(_backward_loop, (as_array(dy), as_array(x), as_array(dx)), work=x.numel())
    return dx


@elementwise
def gated(gate, up):
    """silu(gate) * up."""
    return (gate * sigmoid(gate)) * up


@elementwise
def gated_gradient(dy, gate, up):
    """The gradients of gate and up."""
    c = sigmoid(gate)
    s = gate * c
    return (dy * up) * (c + s * (ONE - c)), dy * s


_gated, _gated_gradient = numba_version("gated"), numba_version("gated_gradient")


@cpu_loop
def _forward_loop(x: Any, y: Any) -> None:
    rows, width = y.shape
    for row in range(rows):
        gate, up, out = x[row, :width], x[row, width:], y[row]
        for i in range(width):
            out[i] = stored(_gated(widened(gate[i]), widened(up[i])), y)


@cpu_loop
def _backward_loop(dy: Any, x: Any, dx: Any) -> None:
    rows, width = dy.shape
    for row in range(rows):
        gate, up, dgate, dup = x[row, :width], x[row, width:], dx[row, :width], dx[row, width:]
        for i in range(width):
            a, b = _gated_gradient(widened(dy[row, i]), widened(gate[i]), widened(up[i]))
            dgate[i], dup[i] = stored(a, dx), stored(b, dx)


def forward_triton(x: Tensor, y: Tensor) -> None:
    """Fill y. Both contiguous; Triton's interpreter takes CPU tensors."""
    rows, width = y.shape
    FORWARD.launch((rows, triton.cdiv(width, BLOCK)), (as_stored(x), as_stored(y)), (), (width, BLOCK))


def backward_triton(dy: Tensor, x: Tensor, dx: Tensor) -> None:
    """Fill dx. All contiguous; Triton's interpreter takes CPU tensors."""
    rows, width = dy.shape
    tensors = (as_stored(dy), as_stored(x), as_stored(dx))
    BACKWARD.launch((rows, triton.cdiv(width, BLOCK)), tensors, (), (width, BLOCK))


@triton.jit
def _ieee_swiglu_forward(x, y, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = load_fp32(x + row * 2 * WIDTH + column, inside)
    up = load_fp32(x + row * 2 * WIDTH + WIDTH + column, inside)
    store_rounded(y + row * WIDTH + column, gated(gate, up), inside)


@triton.jit
def _ieee_swiglu_backward(dy, x, dx, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    grad = load_fp32(dy + row * WIDTH + column, inside)
    gate = load_fp32(x + row * 2 * WIDTH + column, inside)
    up = load_fp32(x + row * 2 * WIDTH + WIDTH + column, inside)
    dgate, dup = gated_gradient(grad, gate, up)
    store_rounded(dx + row * 2 * WIDTH + column, dgate, inside)
    store_rounded(dx + row * 2 * WIDTH + WIDTH + column, dup, inside)


FORWARD, BACKWARD = Kernel(_ieee_swiglu_forward, **UNFUSED), Kernel(_ieee_swiglu_backward, **UNFUSED)
