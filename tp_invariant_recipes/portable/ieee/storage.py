# SPDX-License-Identifier: Apache-2.0
"""Numbers of tensors as the portable kernels read and write them: bf16 as bits in int16, or fp32.

A GPU rounds to bf16 in one instruction, whose NaN is 7fff. In Triton's interpreter, which has another NaN, and in numba
integer arithmetic gives the same bits.
`shared_source.as_array` and `shared_source.as_stored` make the int16 view.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from numba import types
from numba.extending import overload
from torch import Tensor

from tp_invariant_recipes.kernels.cpu.numba_loop import cpu_loop
from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.portable.ieee.math import bf16_bits, canonical, exp, exp2, fp32_of_bf16, log, rsqrt, sigmoid
from tp_invariant_recipes.portable.shared_source import INTERPRETED, UNFUSED, fill, numba_version

SAMPLE_BLOCK = 512

_exp, _log, _sigmoid, _rsqrt, _exp2, _canonical = (
    numba_version(function.__name__) for function in (exp, log, sigmoid, rsqrt, exp2, canonical)
)


FUNCTIONS = ("exp", "log", "sigmoid", "rsqrt", "exp2")  # of portable/ieee/math.py


def function(x: Tensor, name: str) -> Tensor:
    """One of FUNCTIONS of each number, every NaN canonical; fp32, of x's shape and on its device. x: fp32."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    kind = FUNCTIONS.index(name)
    fill(function_triton, _function_loop, (x.contiguous().view(-1), out.view(-1)), kind, work=x.numel())
    return out


def values(x: Tensor) -> Tensor:
    """[n] fp32 → [5, n], all FUNCTIONS."""
    return torch.stack([function(x, name) for name in FUNCTIONS])


@cpu_loop
def _function_loop(x: Any, out: Any, kind: int) -> None:
    for i in range(x.size):
        if kind == 0:
            y = _exp(x[i])
        elif kind == 1:
            y = _log(x[i])
        elif kind == 2:
            y = _sigmoid(x[i])
        elif kind == 3:
            y = _rsqrt(x[i])
        else:
            y = _exp2(x[i])
        out[i] = _canonical(y)


def function_triton(x: Tensor, out: Tensor, kind: int) -> None:
    """Fill out. Both contiguous; Triton's interpreter takes CPU tensors."""
    if x.numel():
        SAMPLES.launch((triton.cdiv(x.numel(), SAMPLE_BLOCK), 1), (x, out), (x.numel(),), (kind, SAMPLE_BLOCK))


@triton.jit(do_not_specialize=["size"])
def _ieee_samples(x, out, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    number = tl.load(x + at, mask=inside, other=0.0)
    if KIND == 0:
        y = exp(number)
    elif KIND == 1:
        y = log(number)
    elif KIND == 2:
        y = sigmoid(number)
    elif KIND == 3:
        y = rsqrt(number)
    else:
        y = exp2(number)
    tl.store(out + at, canonical(y), mask=inside)


SAMPLES = Kernel(_ieee_samples, **UNFUSED)


_from_bf16, _to_bf16, _canonical_bits = (numba_version(name) for name in ("fp32_of_bf16", "bf16_bits", "canonical"))


@triton.jit
def load_fp32(pointer, mask):
    """Return the numbers at `pointer` as fp32, +0 where masked."""
    if pointer.dtype.element_ty == tl.int16:
        return fp32_of_bf16(tl.load(pointer, mask=mask, other=0).to(tl.int32))
    else:
        return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def store_rounded(pointer, value, mask):
    """Store fp32 numbers in the type of `pointer`, rounded to nearest even, every NaN canonical."""
    if pointer.dtype.element_ty == tl.int16:
        if INTERPRETED:
            tl.store(pointer, bf16_bits(value).to(tl.int16), mask=mask)
        else:
            tl.store(pointer, value.to(tl.bfloat16).to(tl.int16, bitcast=True), mask=mask)
    else:
        tl.store(pointer, canonical(value), mask=mask)


def widened(number: Any) -> Any:
    """In code for numba: an element of an array as fp32."""
    raise NotImplementedError("only for code that numba compiles")


def stored(value: Any, array: Any) -> Any:
    """In code for numba: an fp32 number as an element of `array`, as `store_rounded` does it."""
    raise NotImplementedError("only for code that numba compiles")


@overload(widened)
def _widened(number):
    if isinstance(number, types.Integer):
        return lambda number: _from_bf16(number)
    return lambda number: number


@overload(stored)
def _stored(value, array):
    if isinstance(array.dtype, types.Integer):
        return lambda value, array: _to_bf16(value)
    return lambda value, array: _canonical_bits(value)
