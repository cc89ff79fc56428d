"""The sum of kernels/tensor_core_sum.py on a CPU, compiled with numba.

numba and not C: it installs as a wheel on machines without a compiler, and compiles for the vectors of the processor
it finds. The compiled code is kept beside this file, or in the user's cache folder.

All columns of a row are done together, so every inner loop is 32-bit integers without branches, which the compiler
turns into vector instructions. A product of significands has 16 bits; shifted left by 11 it stands at 25 kept bits, and
one right shift by (top - its exponent) cuts it. Eight terms and the accumulator fit 32 bits, so a step has two partial
sums. They are added in fp64, exactly; its bits give the new accumulator.

Importing this module loads numba (a second); compiling takes ten, once a machine.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from tp_invariant_recipes.kernels.tensor_core_sum import LEAST_TOP, NAN, NO_EXPONENT, STEP, bf16_product

HALF = STEP // 2
ROWS_BY_DEFINITION = 16  # rows or columns computed at once by the numpy definition, which needs memory
SMALL = 2**20  # products of numbers that one thread computes faster than several could start
BF16_NAN = 0x7FFF  # what cuBLAS rounds NAN to


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b as a tensor core sums it, on as many threads as torch has.

    a, b:    [m, k] and [k, n] bf16, or both fp32, on the CPU, with any strides.
    returns: [m, n] fp32; `rounded` makes the bf16 output of it.
    raises TypeError: other dtypes.
    """
    if a.dtype != b.dtype or a.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"a product of {a.dtype} and {b.dtype}; both must be bf16, or both fp32")
    out = _fp32(_array(a), _array(b)) if a.dtype == torch.float32 else _bf16(_bits(a), _bits(b))
    return torch.from_numpy(out)


def rounded(total: Tensor) -> Tensor:
    """A sum of `product`, fp32, as the bf16 that a GPU's product would write: to nearest even, every NaN the same."""
    out = total.to(torch.bfloat16)
    return out.view(torch.int16).masked_fill_(total.isnan(), BF16_NAN).view(torch.bfloat16)


def _bf16(a: NDArray[np.uint16], b: NDArray[np.uint16]) -> NDArray[np.float32]:
    padding = -a.shape[1] % STEP
    if padding:
        a, b = np.pad(a, ((0, 0), (0, padding))), np.pad(b, ((0, padding), (0, 0)))
    bits = np.empty((a.shape[0], b.shape[1]), np.uint32)
    _by_rows(_add_bf16, bits, _split(a), _split(b))
    # Infinities and NaN among the operands: the definition itself computes what they reach.
    rows, columns = np.flatnonzero(_not_finite(a).any(1)), np.flatnonzero(_not_finite(b).any(0))
    for start in range(0, rows.size, ROWS_BY_DEFINITION):
        some = rows[start : start + ROWS_BY_DEFINITION]
        bits[some] = bf16_product(a[some], b)
    for start in range(0, columns.size, ROWS_BY_DEFINITION):
        some = columns[start : start + ROWS_BY_DEFINITION]
        bits[:, some] = bf16_product(a, b[:, some])
    return bits.view(np.float32)


def _fp32(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    out = np.zeros((a.shape[0], b.shape[1]), np.float32)
    _by_rows(_add_fp32, out, (a,), (b,))
    return out


def _by_rows(add: Callable[..., None], out: NDArray, a: tuple[NDArray, ...], b: tuple[NDArray, ...]) -> None:
    """Call add(*a, *b, out) for parts of the rows of a and out, side by side. Each row's result is independent of the
    other rows. Threads of Python and not numba's own: those do not survive the fork that starts a CPU rank."""
    m, k = a[0].shape
    threads = min(torch.get_num_threads(), m) if m * k * out.shape[1] > SMALL else 1
    if threads == 1:
        return add(*a, *b, out)
    borders = [m * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        parts = [slice(*ends) for ends in pairwise(borders)]
        for done in [pool.submit(add, *(x[part] for x in a), *b, out[part]) for part in parts]:
            done.result()


def _array(x: Tensor) -> NDArray[Any]:
    return x.detach().contiguous().numpy()


def _bits(x: Tensor) -> NDArray[np.uint16]:
    return _array(x.detach().contiguous().view(torch.int16)).view(np.uint16)


def _not_finite(bits: NDArray[np.uint16]) -> NDArray[np.bool_]:
    return (bits & 0x7F80) == 0x7F80


@njit(cache=True, error_model="numpy")
def _split(bits: Any) -> Any:
    """Significands with their sign and exponents: value = significand * 2 ** (exponent - 7); not finite: zero."""
    significand, exponent = np.empty(bits.shape, np.int32), np.empty(bits.shape, np.int32)
    for i in range(bits.shape[0]):
        for j in range(bits.shape[1]):
            one = np.int32(bits[i, j])
            field = (one >> 7) & 255
            size = (one & 127) | ((field > 0) << 7)
            none = (size == 0) | (field == 255)
            significand[i, j] = 0 if none else (-size if one >> 15 else size)
            exponent[i, j] = NO_EXPONENT if none else field - 127 + (field == 0)
    return significand, exponent


@njit(inline="always")
def _aligned(value: Any, shift: Any) -> Any:
    size = abs(value) >> min(shift, np.int32(31))
    return size if value > 0 else -size


@njit(nogil=True, cache=True, error_model="numpy")
def _add_bf16(sa: Any, ea: Any, sb: Any, eb: Any, out: Any) -> None:
    """sa, ea: [m, k]; sb, eb: [k, n]; int32, contiguous, k a multiple of STEP; out: [m, n] uint32, bits of fp32."""
    m, k = sa.shape
    n = sb.shape[1]
    for i in range(m):
        # The accumulator is significand * 2 ** (scale - 23); of a zero the scale is the least that top can be.
        significand, scale = np.zeros(n, np.int32), np.full(n, LEAST_TOP, np.int32)
        infinite = np.zeros(n, np.int32)  # its sign once the sum has left fp32
        top, low, high = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int32)
        total = np.empty(n, np.float64)
        bits = total.view(np.int64)
        for k0 in range(0, k, STEP):
            for j in range(n):
                top[j] = scale[j]
            for t in range(k0, k0 + STEP):
                e = ea[i, t]
                for j in range(n):
                    top[j] = max(top[j], e + eb[t, j])
            for j in range(n):
                low[j] = _aligned(significand[j] << 2, top[j] - scale[j])
                high[j] = 0
            for t in range(k0, k0 + HALF):
                s, e = sa[i, t], ea[i, t]
                for j in range(n):
                    low[j] += _aligned((s * sb[t, j]) << 11, top[j] - (e + eb[t, j]))
            for t in range(k0 + HALF, k0 + STEP):
                s, e = sa[i, t], ea[i, t]
                for j in range(n):
                    high[j] += _aligned((s * sb[t, j]) << 11, top[j] - (e + eb[t, j]))
            for j in range(n):
                total[j] = np.float64(low[j]) + np.float64(high[j])  # below 2 ** 32: exact
            for j in range(n):
                leading = np.int32((bits[j] >> 52) & 2047)  # 0 of a zero
                exponent = top[j] - np.int32(25 + 1023) + leading
                cut = np.int32(((bits[j] >> 29) & 0x7FFFFF) | 0x800000)
                cut = cut >> min(max(np.int32(-126) - exponent, np.int32(0)), np.int32(31))
                size = np.int32(0) if leading == 0 else cut
                sign = np.int32(-1) if bits[j] < 0 else np.int32(1)
                significand[j] = sign * size
                scale[j] = np.int32(LEAST_TOP) if size == 0 else max(exponent, np.int32(-126))
                infinite[j] = sign if (infinite[j] == 0) & (size != 0) & (exponent > 127) else infinite[j]
        for j in range(n):
            size = abs(significand[j])
            word = size if size < 0x800000 else ((scale[j] + 127) << 23) | (size & 0x7FFFFF)
            negative = significand[j] < 0
            if infinite[j] != 0:
                word, negative = np.int32(0x7F800000), infinite[j] < 0
            out[i, j] = np.uint32(word) | (np.uint32(0x80000000) if negative else np.uint32(0))


@intrinsic
def _fma(typing_context: Any, x: Any, y: Any, z: Any) -> Any:
    """fma(x, y, z) of fp32; LLVM's, an instruction where the processor has one and a library's function elsewhere."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), code


@njit(nogil=True, cache=True, error_model="numpy")
def _add_fp32(a: Any, b: Any, out: Any) -> None:
    """a: [m, k], b: [k, n], contiguous fp32; out: [m, n] fp32 zeros, to which fma adds for every k in order."""
    m, k = a.shape
    n = b.shape[1]
    bits = out.view(np.uint32)
    for i in range(m):
        for t in range(k):
            x = a[i, t]
            for j in range(n):
                out[i, j] = _fma(x, b[t, j], out[i, j])  # type: ignore[call-arg]  # numba passes the context
        for j in range(n):
            if (bits[i, j] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
                bits[i, j] = np.uint32(NAN)
