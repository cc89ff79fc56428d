"""Numbers of tensors as the portable kernels read and write them: bf16 as bits in int16, or fp32.

A GPU rounds to bf16 in one instruction, whose NaN is 7fff. In Triton's interpreter, which has another NaN, and in numba
integer arithmetic gives the same bits.
`shared_source.as_array` and `shared_source.as_stored` make the int16 view.
"""

from typing import Any

import triton
import triton.language as tl
from numba import types
from numba.extending import overload

from tp_invariant_recipes.portable.ieee.math import bf16_bits, canonical, fp32_of_bf16
from tp_invariant_recipes.portable.shared_source import INTERPRETED, numba_version

_from_bf16, _to_bf16, _canonical = (numba_version(name) for name in ("fp32_of_bf16", "bf16_bits", "canonical"))


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
    return lambda value, array: _canonical(value)
