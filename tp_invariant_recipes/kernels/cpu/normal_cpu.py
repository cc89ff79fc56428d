"""The initial weights of numerics/megatron/init.py on a CPU, compiled with numba: its operations, number by number."""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tp_invariant_recipes.kernels.cpu.cpu_threads import by_parts
from tp_invariant_recipes.kernels.cpu.numba_loop import OPTIONS, cpu_loop

WORD = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
AT_ONCE = 1024  # numbers of a row whose bits and quantiles are computed in turn


def fill_normal(
    out: NDArray[np.float32], rows: NDArray[np.int64], first: int, key: int, seed: int, numbers: tuple[Any, ...]
) -> None:
    """Fill out with columns first, first + 1, … of some rows of a tensor.

    out: [rows, columns]. key, seed: as of `init.philox4x32`, 64 bits. numbers: those of `_fill`, from `std` on.
    """
    words = tuple(np.uint64(part) for number in (key, seed) for part in (number & 0xFFFFFFFF, number >> 32))
    by_parts(lambda i, j: _fill(out[i:j], rows[i:j], first, words, *numbers), len(rows), pays=out.size > AT_ONCE)


@njit(**OPTIONS)
def _odd(high: Any, low: Any) -> Any:
    """Twice the 52 bits of two words, and one."""
    bits = (high << np.uint64(20)) | (low >> np.uint64(12))
    return np.int64((bits << np.uint64(1)) | np.uint64(1))


@njit(**OPTIONS)
def _words(c0: Any, c1: Any, words: Any) -> Any:
    k0, k1, c2, c3 = words
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> HALF) ^ c1 ^ k0, b & WORD, (a >> HALF) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & WORD, (k1 + np.uint64(0xBB67AE85)) & WORD
    return c0, c1, c2, c3


@njit(**OPTIONS)
def _horner(x: Any, coefficients: Any) -> Any:
    value = coefficients[-1]
    for i in range(len(coefficients) - 2, -1, -1):
        value = value * x + coefficients[i]
    return value


@njit(**OPTIONS)
def _ratio(x: Any, polynomials: Any) -> Any:
    return _horner(x, polynomials[0]) / _horner(x, polynomials[1])


@njit(**OPTIONS)
def _log(x: Any, series: Any, root_half: Any, log_2: Any) -> Any:
    word = np.float64(x).view(np.int64)
    m = np.int64((word & np.int64(0x000FFFFFFFFFFFFF)) | np.int64(0x3FE0000000000000)).view(np.float64)
    e = np.float64((word >> np.int64(52)) - np.int64(1022))
    if m < root_half:
        m, e = m * 2.0, e - 1.0
    s = (m - 1.0) / (m + 1.0)
    return e * log_2 + s * _horner(s * s, series) * 2.0


@njit(**OPTIONS)
def _outer(q: Any, tail: Any, near: Any, far: Any, series: Any, root_half: Any, log_2: Any) -> Any:
    """Quantiles beyond the central ones."""
    r = np.sqrt(-_log(tail, series, root_half, log_2))
    distance = _ratio(r - 5.0, far) if r > 5.0 else _ratio(r - 1.6, near)
    return -distance if q < 0 else distance


@cpu_loop
def _fill(
    out: Any, rows: Any, first: Any, words: Any, std: Any, mean: Any, central: Any, near: Any, far: Any,
    series: Any, root_half: Any, log_2: Any,
) -> None:  # fmt: skip
    """As `fill_normal`. central, near, far: [2, 8] fp64, the polynomials of `init._ppnd16`; then those of its log."""
    odds, values = np.empty(AT_ONCE + 2, np.int64), np.empty(AT_ONCE, np.float64)
    scale, half, whole = 2.0**-53, np.int64(1) << np.int64(52), np.int64(1) << np.int64(53)
    for i in range(out.shape[0]):
        for start in range(0, out.shape[1], AT_ONCE):
            count, column = min(AT_ONCE, out.shape[1] - start), first + start
            for pair in range((count + column % 2 + 1) // 2):
                w = _words(np.uint64(column // 2 + pair), np.uint64(rows[i]), words)
                odds[2 * pair], odds[2 * pair + 1] = _odd(w[0], w[1]), _odd(w[2], w[3])
            odd = odds[column % 2 : column % 2 + count]
            for j in range(count):
                q = np.float64(odd[j] - half) * scale
                values[j] = _ratio(0.180625 - q * q, central) * q
            for j in range(count):
                q = np.float64(odd[j] - half) * scale
                if abs(q) > 0.425:
                    tail = np.float64(min(odd[j], whole - odd[j])) * scale
                    values[j] = _outer(q, tail, near, far, series, root_half, log_2)
            for j in range(count):
                out[i, start + j] = np.float32(values[j] * std + mean)
