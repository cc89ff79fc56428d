"""An expert's SwiGLU times the router's probability, in stated IEEE fp32 arithmetic: a CPU and every GPU agree.

    y   = ((gate sigmoid(gate)) up) p         every operation rounded once (ieee_swiglu.py); y to its dtype at the end
    dx  the gradients of gate and up that ieee_swiglu.py has for dy p
    dp  = sum of dy ((gate sigmoid(gate)) up) over a row, in lanes (ieee_sums.py): LANES, or fewer for a shorter row

Each row's result is its own. Interface of weighted_activation.py, of which this is "swiglu".
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.cpu.numba_loop import cpu_loop
from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.portable.ieee_storage import load_fp32, store_rounded, stored, widened
from tp_invariant_recipes.portable.ieee_sums import fold_columns, numba_fold, power_of_two
from tp_invariant_recipes.portable.ieee_swiglu import gated, gated_gradient
from tp_invariant_recipes.portable.one_source import UNFUSED, as_array, as_stored, by_rows, numba_version

LANES = 1024


def weighted_swiglu(x: Tensor, p: Tensor) -> Tensor:
    """[rows, 2f], gate and up side by side, and p [rows], bf16 or fp32 → [rows, f] of x's dtype."""
    x, p = x.contiguous(), p.contiguous()
    y = x.new_empty(x.shape[0], x.shape[1] // 2)
    if x.is_cuda:
        forward_triton(x, p, y)
    else:
        by_rows(_forward_loop, (as_array(x), as_array(p), as_array(y)), work=x.numel())
    return y


def weighted_swiglu_backward(dy: Tensor, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and p, of their shapes and dtypes. dy: [rows, f]."""
    dy, x, p = dy.contiguous(), x.contiguous(), p.contiguous()
    dx, dp = torch.empty_like(x), torch.empty_like(p)
    tensors = (dy, x, p, dx, dp)
    if x.is_cuda:
        backward_triton(*tensors)
    else:
        by_rows(_backward_loop, tuple(as_array(tensor) for tensor in tensors), _lanes(dy.shape[1]), work=x.numel())
    return dx, dp


def _lanes(width: int) -> int:
    return min(LANES, power_of_two(width))


_gated, _gated_gradient = numba_version("gated"), numba_version("gated_gradient")


@cpu_loop
def _forward_loop(x: Any, p: Any, y: Any) -> None:
    rows, width = y.shape
    for row in range(rows):
        gate, up, weight = x[row, :width], x[row, width:], widened(p[row])
        for i in range(width):
            y[row, i] = stored(_gated(widened(gate[i]), widened(up[i])) * weight, y)


@cpu_loop
def _backward_loop(dy: Any, x: Any, p: Any, dx: Any, dp: Any, lanes: int) -> None:
    rows, width = dy.shape
    lane = np.empty(lanes, np.float32)
    for row in range(rows):
        gate, up, dgate, dup = x[row, :width], x[row, width:], dx[row, :width], dx[row, width:]
        weight = widened(p[row])
        lane[:] = 0.0
        for i in range(width):
            wide, g, u = widened(dy[row, i]), widened(gate[i]), widened(up[i])
            lane[i % lanes] += wide * _gated(g, u)
            a, b = _gated_gradient(wide * weight, g, u)
            dgate[i], dup[i] = stored(a, dx), stored(b, dx)
        dp[row] = stored(numba_fold(lane), dp)


def forward_triton(x: Tensor, p: Tensor, y: Tensor) -> None:
    """Fill y. All contiguous; Triton's interpreter takes CPU tensors."""
    rows, width = y.shape
    if rows:
        tensors = (as_stored(x), as_stored(p), as_stored(y))
        FORWARD.launch((rows, triton.cdiv(width, LANES)), tensors, (), (width, LANES))


def backward_triton(dy: Tensor, x: Tensor, p: Tensor, dx: Tensor, dp: Tensor) -> None:
    """Fill dx and dp. All contiguous; Triton's interpreter takes CPU tensors."""
    rows, width = dy.shape
    if rows:
        tensors = tuple(as_stored(tensor) for tensor in (dy, x, p, dx, dp))
        BACKWARD.launch((rows, 1), tensors, (), (width, _lanes(width)))


@triton.jit
def _ieee_expert_forward(x, p, y, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = load_fp32(x + row * 2 * WIDTH + column, inside)
    up = load_fp32(x + row * 2 * WIDTH + WIDTH + column, inside)
    weight = load_fp32(p + row + tl.zeros((BLOCK,), tl.int64), inside)
    store_rounded(y + row * WIDTH + column, gated(gate, up) * weight, inside)


@triton.jit
def _ieee_expert_backward(dy, x, p, dx, dp, WIDTH: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, WIDTH, LANES):
        column = start + tl.arange(0, LANES)
        inside = column < WIDTH
        wide = load_fp32(dy + row * WIDTH + column, inside)
        gate = load_fp32(x + row * 2 * WIDTH + column, inside)
        up = load_fp32(x + row * 2 * WIDTH + WIDTH + column, inside)
        weight = load_fp32(p + row + tl.zeros((LANES,), tl.int64), inside)
        total = tl.where(inside, total + wide * gated(gate, up), total)
        dgate, dup = gated_gradient(wide * weight, gate, up)
        store_rounded(dx + row * 2 * WIDTH + column, dgate, inside)
        store_rounded(dx + row * 2 * WIDTH + WIDTH + column, dup, inside)
    whole = fold_columns(tl.reshape(total, [1, LANES]), 1, LANES)
    one = tl.arange(0, 1)
    store_rounded(dp + row + one, whole, one < 1)


FORWARD, BACKWARD = Kernel(_ieee_expert_forward, **UNFUSED), Kernel(_ieee_expert_backward, **UNFUSED)
