# SPDX-License-Identifier: Apache-2.0
"""One source for two compilers: a function of numbers that Triton compiles for GPUs, and numba for a CPU.

    HALF = constant(0.5)

    @elementwise
    def middle(a, b):
        return (a + b) * HALF

`middle` is then a Triton function, for use in kernels. `numba_version("middle")` is the same source compiled by numba,
for loops over arrays. tests/definitions/elementwise.py rounds every operation by itself, in numpy: the definition.
Neither compiler may contract a product and a sum to an FMA: a kernel is launched with UNFUSED, and numba contracts only
with fastmath. An FMA is written as `fma`.

The source of an elementwise function may have: + - * of fp32, `tl.div_rn`, `tl.sqrt_rn`, `tl.where`, comparisons,
+ - & | << >> of int32, `bits_of`, `fp32_of`, `fma`, `at_least`, other elementwise functions, and constants by name. A
number written there would be fp64 to numba, unless it is an integer.
"""

from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from tp_invariant_recipes.kernels.cpu import numba_loop
from tp_invariant_recipes.kernels.cpu.cpu_threads import by_parts
from tp_invariant_recipes.kernels.cpu.numba_loop import OPTIONS

UNFUSED = {"enable_fp_fusion": False}  # options of a launch
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # by Triton's interpreter, in a kernel
SMALL = 2**15  # numbers that one thread computes faster than several could start


def constant(value: float) -> Any:
    """Return a number for elementwise functions, rounded to fp32; an int stays one."""
    return tl.constexpr(value if isinstance(value, int) else float(np.float32(value)))


def elementwise(function: Callable) -> Any:
    """Give a function to both compilers. Raises ValueError: another one has its name.

    returns: Triton's.
    """
    name = function.__name__
    if name in _sources:
        raise ValueError(f"two elementwise functions are called {name}")
    _sources[name] = function
    return triton.jit(function)


@cache
def numba_version(name: str) -> Any:
    """Return what numba has compiled of an elementwise function: of scalars."""
    return njit(**OPTIONS)(renamed(name, _OF_NUMBA, numba_version))


def renamed(name: str, own: Mapping[str, Any], version: Callable[[str], Any]) -> Callable:
    """Return an elementwise function in which names mean what they do to a compiler.

    own:     what stands for `tl`, `bits_of`, `fp32_of`, `fma` and `at_least`.
    version: makes the other elementwise functions that this one calls, from their names.
    """
    source = _sources[name]
    names: dict[str, Any] = {"__name__": source.__module__}
    for used in source.__code__.co_names:
        if used in own:
            names[used] = own[used]
        elif used in _sources:
            names[used] = version(used)
        elif used in source.__globals__:
            names[used] = _typed(source.__globals__[used])
    return FunctionType(source.__code__, names, name)


def _typed(value: Any) -> Any:
    value = value.value if isinstance(value, tl.constexpr) else value
    return np.float32(value) if isinstance(value, float) else np.int32(value)


def by_rows(loop: Callable[..., None], rows: tuple[NDArray, ...], *others: Any, work: int) -> None:
    """Call loop(*rows, *others) for parts of the arrays `rows`, on the rank's processors.

    rows:   arrays of one length; a row's result must not depend on the other rows.
    work:   the numbers that the whole call reads.
    """
    by_parts(lambda i, j: loop(*(array[i:j] for array in rows), *others), len(rows[0]), pays=work > SMALL)


def fill(
    launch: Callable[..., None], loop: Callable[..., None], tensors: tuple[Tensor, ...], *others: Any, work: int
) -> None:
    """Have the last of some contiguous tensors filled: on a GPU by a launch, on a CPU by a loop over their rows.

    launch, loop: called with the tensors, which a loop gets as arrays, and the others. work: as of `by_rows`.
    """
    if tensors[0].is_cuda:
        launch(*tensors, *others)
    else:
        by_rows(loop, tuple(map(as_array, tensors)), *others, work=work)


def as_array(x: Tensor) -> NDArray:
    """Return a contiguous CPU tensor as numpy's array of its memory. bf16 numbers are their bits, int16."""
    x = x.detach()
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def as_stored(x: Tensor) -> Tensor:
    """Return a tensor as a kernel takes it: bf16 numbers are their bits, int16."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


# --- the functions that each compiler has of its own ---


@triton.jit
def bits_of(x):
    """Return the bits of fp32 numbers as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def fp32_of(bits):
    """Return the fp32 numbers with these bits, int32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def fma(a, b, c):
    """Compute a * b + c of fp32 numbers, rounded once."""
    return tl.fma(a, b, c)


@triton.jit
def at_least(x, least):
    """Return the larger of two fp32 numbers that are not zeros of two signs; a NaN stays one."""
    return tl.maximum(x, least, propagate_nan=tl.PropagateNan.ALL)


@njit(**OPTIONS)
def _numba_at_least(x: Any, least: Any) -> Any:
    return least if x < least else x


@njit(**OPTIONS)
def _numba_bits_of(x: Any) -> Any:
    return np.float32(x).view(np.int32)


@njit(**OPTIONS)
def _numba_fp32_of(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


@njit(**OPTIONS)
def _numba_where(condition: Any, a: Any, b: Any) -> Any:
    return a if condition else b


@njit(**OPTIONS)
def _numba_div_rn(a: Any, b: Any) -> Any:
    return np.float32(a) / np.float32(b)


@njit(**OPTIONS)
def _numba_sqrt_rn(a: Any) -> Any:
    return np.sqrt(np.float32(a))


_language = ModuleType("tl")
vars(_language).update(where=_numba_where, div_rn=_numba_div_rn, sqrt_rn=_numba_sqrt_rn)
_OF_NUMBA: dict[str, Any] = {
    "tl": _language,
    "bits_of": _numba_bits_of,
    "fp32_of": _numba_fp32_of,
    "fma": numba_loop.fma,
    "at_least": _numba_at_least,
}
_sources: dict[str, Callable] = {}
