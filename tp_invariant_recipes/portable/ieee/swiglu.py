# SPDX-License-Identifier: Apache-2.0
"""SwiGLU in stated IEEE fp32 arithmetic, and times an expert's probability: a CPU and every GPU give the same bits.

c      = sigmoid(gate)                  every operation in fp32, rounded once (ieee_math.py)
s      = gate c
y      = (s up) p                       rounded once to the output's dtype
dgate  = ((dy p) up) (c + s (1 - c))
dup    = (dy p) s
dp     = sum of dy (s up) over a row, in lanes (ieee_sums.py): LANES, or fewer for a shorter row

Without probabilities p is 1. Each row's result is its own.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.cpu.numba_loop import cpu_loop
from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.portable.ieee.math import ONE_FP32, fold_columns, numba_fold, power_of_two, sigmoid
from tp_invariant_recipes.portable.ieee.storage import load_fp32, store_rounded, stored, widened
from tp_invariant_recipes.portable.shared_source import UNFUSED, as_stored, elementwise, fill, numba_version

LANES = 1024


def swiglu(x: Tensor, p: Tensor | None = None) -> Tensor:
    """silu(gate) * up, times p if there is one.

    x:       [rows, 2f], gate and up side by side; p: [rows]; each bf16 or fp32.
    returns: [rows, f] of x's dtype.
    """
    x = x.contiguous()
    y = x.new_empty(x.shape[0], x.shape[1] // 2)
    fill(forward_triton, _forward_loop, (x, _weights(x, p), y), p is not None, work=x.numel())
    return y


def swiglu_backward(dy: Tensor, x: Tensor, p: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and p, of their shapes and dtypes; without p the second says nothing. dy: [rows, f]."""
    dy, x, weights = dy.contiguous(), x.contiguous(), _weights(x, p)
    dx, dp = torch.empty_like(x), weights if p is None else torch.empty_like(weights)
    lanes = min(LANES, power_of_two(dy.shape[1]))
    fill(backward_triton, _backward_loop, (dy, x, weights, dx, dp), p is not None, lanes, work=x.numel())
    return dx, dp


def _weights(x: Tensor, p: Tensor | None) -> Tensor:
    """p; without it numbers that nobody reads."""
    return x.contiguous().view(-1)[: len(x)] if p is None else p.contiguous()


@elementwise
def gated(gate, up):
    """silu(gate) * up."""
    return (gate * sigmoid(gate)) * up


@elementwise
def gated_gradient(dy, gate, up):
    """Return the gradients of gate and up."""
    c = sigmoid(gate)
    s = gate * c
    return (dy * up) * (c + s * (ONE_FP32 - c)), dy * s


_gated, _gated_gradient = numba_version("gated"), numba_version("gated_gradient")


@cpu_loop
def _forward_loop(x: Any, p: Any, y: Any, weighted: bool) -> None:
    rows, width = y.shape
    for row in range(rows):
        gate, up, weight = x[row, :width], x[row, width:], widened(p[row]) if weighted else np.float32(1)
        for i in range(width):
            y[row, i] = stored(_gated(widened(gate[i]), widened(up[i])) * weight, y)


@cpu_loop
def _backward_loop(dy: Any, x: Any, p: Any, dx: Any, dp: Any, weighted: bool, lanes: int) -> None:
    rows, width = dy.shape
    lane = np.empty(lanes, np.float32)
    for row in range(rows):
        gate, up, dgate, dup = x[row, :width], x[row, width:], dx[row, :width], dx[row, width:]
        weight = widened(p[row]) if weighted else np.float32(1)
        lane[:] = 0.0
        for i in range(width):
            wide, g, u = widened(dy[row, i]), widened(gate[i]), widened(up[i])
            if weighted:
                lane[i % lanes] += wide * _gated(g, u)
            a, b = _gated_gradient(wide * weight, g, u)
            dgate[i], dup[i] = stored(a, dx), stored(b, dx)
        if weighted:
            dp[row] = stored(numba_fold(lane), dp)


def forward_triton(x: Tensor, p: Tensor, y: Tensor, weighted: bool) -> None:
    """Fill y. All contiguous; Triton's interpreter takes CPU tensors."""
    rows, width = y.shape
    if rows:
        tensors = (as_stored(x), as_stored(p), as_stored(y))
        FORWARD.launch((rows, triton.cdiv(width, LANES)), tensors, (), (width, weighted, LANES))


def backward_triton(dy: Tensor, x: Tensor, p: Tensor, dx: Tensor, dp: Tensor, weighted: bool, lanes: int) -> None:
    """Fill dx and dp. All contiguous; Triton's interpreter takes CPU tensors."""
    rows, width = dy.shape
    programs = 1 if weighted else triton.cdiv(width, lanes)  # of a row; the sum over a row needs all of it
    if rows:
        tensors = tuple(as_stored(tensor) for tensor in (dy, x, p, dx, dp))
        BACKWARD.launch((rows, programs), tensors, (), (width, weighted, lanes))


@triton.jit
def _ieee_swiglu_forward(x, p, y, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = load_fp32(x + row * 2 * WIDTH + column, inside)
    up = load_fp32(x + row * 2 * WIDTH + WIDTH + column, inside)
    result = gated(gate, up)
    if WEIGHTED:
        result *= load_fp32(p + row + tl.zeros((BLOCK,), tl.int64), inside)
    store_rounded(y + row * WIDTH + column, result, inside)


@triton.jit
def _ieee_swiglu_backward(dy, x, p, dx, dp, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, WIDTH if WEIGHTED else LANES, LANES):
        column = tl.program_id(1) * LANES + start + tl.arange(0, LANES)
        inside = column < WIDTH
        wide = load_fp32(dy + row * WIDTH + column, inside)
        gate = load_fp32(x + row * 2 * WIDTH + column, inside)
        up = load_fp32(x + row * 2 * WIDTH + WIDTH + column, inside)
        if WEIGHTED:
            total = tl.where(inside, total + wide * gated(gate, up), total)
            wide *= load_fp32(p + row + tl.zeros((LANES,), tl.int64), inside)
        dgate, dup = gated_gradient(wide, gate, up)
        store_rounded(dx + row * 2 * WIDTH + column, dgate, inside)
        store_rounded(dx + row * 2 * WIDTH + WIDTH + column, dup, inside)
    if WEIGHTED:
        whole = fold_columns(tl.reshape(total, [1, LANES]), 1, LANES)
        lane = tl.arange(0, 1)
        store_rounded(dp + row + lane, whole, lane < 1)


FORWARD, BACKWARD = Kernel(_ieee_swiglu_forward, **UNFUSED), Kernel(_ieee_swiglu_backward, **UNFUSED)
