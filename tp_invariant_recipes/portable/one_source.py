"""One source for two compilers: a function of numbers that Triton compiles for GPUs, and numba for a CPU.

    HALF = constant(0.5)

    @elementwise
    def middle(a, b):
        return (a + b) * HALF

`middle` is then a Triton function, for use in kernels. `numba_version("middle")` is the same source compiled by numba,
for loops over arrays; `numpy_version("middle")` takes arrays and rounds every operation by itself, which tests take as
the definition. Neither compiler may contract a product and a sum to an FMA: a kernel is launched with UNFUSED, and
numba contracts only with fastmath. An FMA is written as `fma`.

The source of an elementwise function may have: + - * of fp32, `tl.div_rn`, `tl.sqrt_rn`, `tl.where`, comparisons,
+ - & | << >> of int32, `bits_of`, `fp32_of`, `fma`, `at_least`, other elementwise functions, and constants by name. A
number written there would be fp64 to numba, unless it is an integer.
"""

from collections.abc import Callable
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

from tp_invariant_recipes.kernels.cpu import numba_fma
from tp_invariant_recipes.kernels.cpu.cpu_threads import by_parts
from tp_invariant_recipes.kernels.cpu.numba_loop import OPTIONS

UNFUSED = {"enable_fp_fusion": False}  # options of a launch
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # by Triton's interpreter, in a kernel
SMALL = 2**15  # numbers that one thread computes faster than several could start


def constant(value: float) -> Any:
    """A number for elementwise functions, rounded to fp32; an int stays one."""
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


def numba_version(name: str) -> Any:
    """What numba has compiled of an elementwise function: of scalars."""
    return _version(name, "numba")


def numpy_version(name: str) -> Callable:
    """An elementwise function on arrays of numpy; every operation is rounded by itself."""
    function = _version(name, "numpy")

    def quiet(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*arguments)

    return quiet


def by_rows(loop: Callable[..., None], rows: tuple[NDArray, ...], *others: Any, work: int) -> None:
    """Call loop(*rows, *others) for parts of the arrays `rows`, on the rank's processors.

    rows:   arrays of one length; a row's result must not depend on the other rows.
    work:   the numbers that the whole call reads.
    """
    by_parts(lambda i, j: loop(*(array[i:j] for array in rows), *others), len(rows[0]), pays=work > SMALL)


def as_array(x: Tensor) -> NDArray:
    """A contiguous CPU tensor as numpy's array of its memory. bf16 numbers are their bits, int16."""
    x = x.detach()
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def as_stored(x: Tensor) -> Tensor:
    """A tensor as a kernel takes it: bf16 numbers are their bits, int16."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


# --- the functions that each compiler has of its own ---


@triton.jit
def bits_of(x):
    """The bits of fp32 numbers as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def fp32_of(bits):
    """The fp32 numbers with these bits, int32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def fma(a, b, c):
    """a * b + c of fp32 numbers, rounded once."""
    return tl.fma(a, b, c)


@triton.jit
def at_least(x, least):
    """The larger of two fp32 numbers that are not zeros of two signs; a NaN stays one."""
    return tl.maximum(x, least, propagate_nan=tl.PropagateNan.ALL)


@njit(**OPTIONS)
def _numba_at_least(x: Any, least: Any) -> Any:
    return least if x < least else x


def numpy_fma(a: Any, b: Any, c: Any) -> Any:
    """In fp64 the product is exact. The sum is rounded to odd, after which rounding to fp32 is as if it were the first
    (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008)."""
    product = np.float64(a) * np.float64(b)
    total = product + np.float64(c)
    part = total - product
    lost = (product - (total - part)) + (np.float64(c) - part)
    even = (total.view(np.int64) & 1) == 0
    toward = np.where(lost > 0, np.inf, -np.inf)
    inexact = np.isfinite(total) & (lost != 0) & even
    return np.where(inexact, np.nextafter(total, toward), total).astype(np.float32)


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


def _language(**functions: Any) -> ModuleType:
    """What stands for `tl`."""
    module = ModuleType("tl")
    module.__dict__.update(functions)
    return module


_OWN: dict[str, dict[str, Any]] = {
    "numba": {
        "tl": _language(where=_numba_where, div_rn=_numba_div_rn, sqrt_rn=_numba_sqrt_rn),
        "bits_of": _numba_bits_of,
        "fp32_of": _numba_fp32_of,
        "fma": numba_fma.fma,
        "at_least": _numba_at_least,
    },
    "numpy": {
        "tl": _language(where=np.where, div_rn=lambda a, b: np.float32(a) / b, sqrt_rn=lambda a: np.sqrt(a)),
        "bits_of": lambda x: np.asarray(x, np.float32).view(np.int32),
        "fp32_of": lambda bits: np.asarray(bits).astype(np.int32).view(np.float32),
        "fma": numpy_fma,
        "at_least": lambda x, least: np.where(x < least, least, x),
    },
}
_sources: dict[str, Callable] = {}


@cache
def _version(name: str, compiler: str) -> Any:
    """The function with this compiler's versions of all that it names."""
    source = _sources[name]
    own = _OWN[compiler]
    names: dict[str, Any] = {"__name__": source.__module__}
    for used in source.__code__.co_names:
        if used in own:
            names[used] = own[used]
        elif used in _sources:
            names[used] = _version(used, compiler)
        elif used in source.__globals__:
            names[used] = _typed(source.__globals__[used])
    function = FunctionType(source.__code__, names, name)
    return njit(**OPTIONS)(function) if compiler == "numba" else function


def _typed(value: Any) -> Any:
    value = value.value if isinstance(value, tl.constexpr) else value
    return np.float32(value) if isinstance(value, float) else np.int32(value)
