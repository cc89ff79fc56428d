# SPDX-License-Identifier: Apache-2.0
"""The sum that kernels/gemm/segmented_k_gemm.py defines, in numpy: a term at a time, as its text says it."""

import numpy as np
from numpy.typing import NDArray

from tp_invariant_recipes.kernels.gemm.segmented_k_gemm import KEPT_BITS, LEAST_TOP, NAN, STEP

INFINITY = 0x7F800000
NO_EXPONENT = -(2**20)  # below every exponent: of a zero


def bf16_product(a: NDArray[np.uint16], b: NDArray[np.uint16], *, kept: int = KEPT_BITS, step: int = STEP) -> NDArray:
    """a @ b by the definition above.

    a, b:       [m, k] and [k, n]: bits of bf16 numbers.
    kept, step: other arithmetic, for the controls of tests.
    returns:    [m, n] uint32: bits of fp32 numbers.
    """
    padding = -a.shape[1] % step
    a, b = np.pad(a, ((0, 0), (0, padding))), np.pad(b, ((0, padding), (0, 0)))
    total = np.zeros((a.shape[0], b.shape[1]), np.uint32)
    for start in range(0, a.shape[1], step):
        part = slice(start, start + step)
        total = _step(a[:, part, None], b[None, part, :], total, kept)
    return total


def fp32_product(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray:
    """a @ b by the definition above.

    a, b:    [m, k] and [k, n] fp32.
    returns: [m, n] uint32: bits of fp32 numbers; every NaN is NAN.
    """
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        total = fma(a[:, k, None], b[None, k, :], total)
    return np.where(np.isnan(total), np.uint32(NAN), total.view(np.uint32))


def _step(a: NDArray, b: NDArray, total: NDArray, kept: int) -> NDArray:
    """a: [m, step, 1], b: [1, step, n], total: [m, n] bits; returns the new total."""
    (x, x_exponent), (y, y_exponent) = _split_bf16(a), _split_bf16(b)
    terms, exponents = x * y, x_exponent + y_exponent  # a term is terms * 2 ** (exponents - 14)
    before, before_exponent = _split_fp32(total)  # before * 2 ** (before_exponent - 23)
    top = np.where(terms != 0, exponents, NO_EXPONENT).max(1)
    top = np.maximum(np.maximum(top, np.where(before != 0, before_exponent, NO_EXPONENT)), LEAST_TOP)
    unit = top - kept
    sums = _cut(terms, unit[:, None, :] - (exponents - 14)).sum(1) + _cut(before, unit - (before_exponent - 23))
    return _special(a, b, total, _fp32(sums, unit))


def _split_bf16(bits: NDArray) -> tuple[NDArray, NDArray]:
    """Significand with its sign and exponent; the value is significand * 2 ** (exponent - 7). Not finite: zero."""
    return _split(bits.astype(np.int64), 7)


def _split_fp32(bits: NDArray) -> tuple[NDArray, NDArray]:
    """Significand with its sign and exponent of fp32: significand * 2 ** (exponent - 23)."""
    return _split(bits.astype(np.int64), 23)


def _split(bits: NDArray, fraction: int) -> tuple[NDArray, NDArray]:
    field, significand = bits >> fraction & 255, bits & (1 << fraction) - 1
    significand = np.where(field > 0, significand | 1 << fraction, significand)
    significand = np.where(field == 255, 0, significand)
    return np.where(bits >> fraction + 8 & 1, -significand, significand), np.maximum(field, 1) - 127


def _cut(value: NDArray, shift: NDArray) -> NDArray:
    """value * 2 ** -shift, cut toward zero."""
    size = np.abs(value)
    return np.sign(value) * np.where(shift > 0, size >> np.clip(shift, 0, 62), size << np.clip(-shift, 0, 38))


def _fp32(sums: NDArray, unit: NDArray) -> NDArray:
    """Bits of sums * 2 ** unit, cut toward zero to fp32."""
    size = np.abs(sums)
    exponent = unit + np.frexp(size.astype(np.float64))[1] - 1
    last = np.maximum(exponent - 23, -149)
    significand = _cut(size, last - unit)
    bits = np.where(significand >= 1 << 23, (last + 150 << 23) | (significand & (1 << 23) - 1), significand)
    bits = np.where((size != 0) & (exponent > 127), INFINITY, bits)
    return np.where((sums < 0) & (bits != 0), bits | 1 << 31, bits).astype(np.uint32)


def _special(a: NDArray, b: NDArray, total: NDArray, bits: NDArray) -> NDArray:
    """Put infinities and NaN in: of the operands, and of the total before this step."""
    with np.errstate(over="ignore", invalid="ignore"):  # of finite numbers, which are not used
        x, y = _as_float(a.astype(np.uint32) << 16), _as_float(b.astype(np.uint32) << 16)
        products = np.where(np.isfinite(x) & np.isfinite(y), np.float32(0), x * y)
    terms = np.concatenate([products, _as_float(total)[:, None, :]], 1)
    above, below = (terms == np.inf).any(1), (terms == -np.inf).any(1)
    bits = np.where(above, INFINITY, np.where(below, INFINITY | 1 << 31, bits))
    return np.where(np.isnan(terms).any(1) | (above & below), NAN, bits).astype(np.uint32)


def _as_float(bits: NDArray) -> NDArray[np.float32]:
    return np.ascontiguousarray(bits).view(np.float32)


def fma(x: NDArray, y: NDArray, z: NDArray) -> NDArray[np.float32]:
    """x * y + z rounded once, to nearest even.

    The product of two fp32 numbers is exact in fp64. Their sum is not: it is rounded to odd first (Boldo & Melquiond,
    "Emulation of FMA and correctly rounded sums", 2008), which the second rounding cannot spoil.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        gemm, addend = x.astype(np.float64) * y.astype(np.float64), np.broadcast_to(z, np.broadcast(x, y, z).shape)
        addend = addend.astype(np.float64)
        gemm = np.broadcast_to(gemm, addend.shape)
        sums = gemm + addend
        back = sums - gemm
        error = (gemm - (sums - back)) + (addend - back)  # exact: Knuth's TwoSum
        even = (sums.view(np.int64) & 1) == 0
        toward = np.where((error > 0) == (sums > 0), 1, -1)  # the neighbour on the other side of the error is odd
        odd = (sums.view(np.int64) + toward).view(np.float64)
        inexact = np.isfinite(sums) & (error != 0) & even
        return np.where(inexact, odd, sums).astype(np.float32)
