# SPDX-License-Identifier: Apache-2.0
"""Adam in stated IEEE fp32 arithmetic: a CPU and every GPU give the same bits.

    g      = gradient (+ weight_decay p,                           if the decay is not decoupled)
    m      = beta1 m + (1 - beta1) g
    v      = beta2 v + ((1 - beta2) g) g
    u      = (m / c1) / (sqrt(v / c2) + eps) (+ weight_decay p,    if the decay is decoupled: AdamW)
    p      = p - lr u

These are the formulas of Transformer Engine's FusedAdam; there a compiler chooses which products and sums become FMA.
c1 = 1 - beta1^step and c2 = 1 - beta2^step in fp64, the power by repeated squaring, since a library's `pow` may differ.
All numbers of a step are rounded to fp32 before it.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.clipped_adam import AdamNumbers, Update
from tp_invariant_recipes.kernels.cpu.numba_loop import cpu_loop
from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.portable.ieee.math import canonical
from tp_invariant_recipes.portable.shared_source import UNFUSED, as_array, by_rows, elementwise, numba_version

BLOCK = 1024


@lru_cache(16)  # the parameters of a group share them, and each would take the host 12 us
def adam_numbers(step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> AdamNumbers:
    """Return the numbers of step `step`, the first of which is 1."""
    if step < 1:
        raise ValueError(f"the first step of Adam is 1, not {step}")
    corrections = (1.0 - power(beta, step) for beta in betas)
    exact = (lr, betas[0], 1.0 - betas[0], betas[1], 1.0 - betas[1], *corrections, eps, weight_decay)
    return AdamNumbers(*(float(np.float32(number)) for number in exact))


def power(base: float, exponent: int) -> float:
    """Compute base ** exponent in fp64: its bits name squares of base, multiplied from the lowest."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def adam_step(p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: AdamNumbers, decoupled: bool = True) -> None:
    """One step of Adam, in place: a parameter, its gradient and moments, fp32, contiguous, of one shape.

    decoupled: whether weight decay is AdamW's.
    raises ValueError: a tensor is not fp32 or not contiguous.
    """
    tensors = (p, g, m, v)
    if any(tensor.dtype.itemsize != 4 or not tensor.is_contiguous() for tensor in tensors):
        raise ValueError("Adam's tensors must be fp32 and contiguous")
    if p.is_cuda:
        step_triton(*tensors, numbers, decoupled)
    else:
        arrays = tuple(as_array(tensor).reshape(-1) for tensor in tensors)
        by_rows(_step_loop, arrays, tuple(map(np.float32, numbers)), decoupled, work=p.numel())


@elementwise
def adam(p, g, m, v, lr, beta1, rest1, beta2, rest2, correction1, correction2, eps, decay, decoupled):
    """Return the new p, m and v."""
    g = tl.where(decoupled, g, g + p * decay)
    m = m * beta1 + g * rest1
    v = v * beta2 + (g * rest2) * g
    update = tl.div_rn(tl.div_rn(m, correction1), tl.sqrt_rn(tl.div_rn(v, correction2)) + eps)
    update = tl.where(decoupled, update + p * decay, update)
    return canonical(p - update * lr), canonical(m), canonical(v)


@triton.jit
def _clipped_update(p, g, m, v, lr, beta1, rest1, beta2, rest2, correction1, correction2, eps, decay, clip):
    g = g * clip
    p, m, v = adam(p, g, m, v, lr, beta1, rest1, beta2, rest2, correction1, correction2, eps, decay, True)
    return p, m, v, g


CLIPPED = Update(  # AdamW
    _clipped_update,
    lambda of: adam_numbers(of.step, float(of.lr), tuple(of.betas), of.eps, of.weight_decay),
)


_adam = numba_version("adam")


@cpu_loop
def _step_loop(p: Any, g: Any, m: Any, v: Any, numbers: Any, decoupled: bool) -> None:
    lr, beta1, rest1, beta2, rest2, correction1, correction2, eps, decay = numbers
    for i in range(p.size):
        p[i], m[i], v[i] = _adam(
            p[i], g[i], m[i], v[i], lr, beta1, rest1, beta2, rest2, correction1, correction2, eps, decay, decoupled
        )


def step_triton(p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: AdamNumbers, decoupled: bool) -> None:
    """Change p, m and v. All contiguous; Triton's interpreter takes CPU tensors."""
    size = p.numel()
    if size:
        STEP.launch((triton.cdiv(size, BLOCK), 1), (p, g, m, v), (size, *numbers), (decoupled, BLOCK))


_NUMBERS = ["size", *AdamNumbers._fields]


@triton.jit(do_not_specialize=_NUMBERS)
def _ieee_adam(
    p, g, m, v, size, lr, beta1, rest1, beta2, rest2, correction1, correction2, eps, decay,
    DECOUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    old_p, old_g = tl.load(p + at, mask=inside, other=0.0), tl.load(g + at, mask=inside, other=0.0)
    old_m, old_v = tl.load(m + at, mask=inside, other=0.0), tl.load(v + at, mask=inside, other=0.0)
    new_p, new_m, new_v = adam(
        old_p, old_g, old_m, old_v, lr, beta1, rest1, beta2, rest2, correction1, correction2, eps, decay, DECOUPLED
    )
    tl.store(p + at, new_p, mask=inside)
    tl.store(m + at, new_m, mask=inside)
    tl.store(v + at, new_v, mask=inside)


STEP = Kernel(_ieee_adam, **UNFUSED)
