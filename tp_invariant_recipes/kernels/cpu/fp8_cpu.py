# SPDX-License-Identifier: Apache-2.0
"""The products of kernels/gemm/fp8_tiles.py on a CPU, compiled with numba as kernels/cpu/tensor_core_cpu.py is.

WIDE columns of a row are done together. An FP8 product is exact in fp32, and so is it times 2 ** (KEPT_BITS - top),
which the conversion to an integer cuts toward zero. A step's 33 terms fit 32 bits. Their sum is exact in fp32 again,
and its bits are masked to KEPT_BITS bits after the leading one. Exponents are small: 8 bits hold the sum of two.

The loops go through a panel of b block by block, and through all rows for each, so that a block stays in the cache.

A block with infinities or NaN is added a second time, in fp32 and in any order: where that sum is not finite, it is the
accumulator (an infinity times a finite number is an infinity, or NaN if that is zero; finite sums cannot overflow).
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from tp_invariant_recipes.kernels.cpu.cpu_threads import by_parts
from tp_invariant_recipes.kernels.cpu.numba_loop import OPTIONS, cpu_loop, fma
from tp_invariant_recipes.kernels.cpu.tensor_core_cpu import SMALL, WIDE
from tp_invariant_recipes.kernels.gemm.fp8_tiles import KEPT_BITS, LEAST, PROMOTED, STEP, kind
from tp_invariant_recipes.kernels.gemm.quantize import Quantized
from tp_invariant_recipes.kernels.gemm.segmented_k_gemm import NAN

ROUNDED_ALONE = 2**18  # numbers that one thread rounds faster than another could start
BLOCK = 32
INFINITY = np.int32(0x7F80)  # bits of bf16
SUBNORMAL = np.int32(0x00400000)  # bits of 2 ** -127 in fp32
Type = tuple[int, int, int]


def round_rows(x: NDArray[np.int16], out: NDArray[np.int16], kind: Type) -> None:
    """Round blocks of 32 along k. x, out: [rows, k], bits of bf16. kind: of `mxfp8.TYPES`."""
    numbers = tuple(map(np.int32, kind))
    by_parts(lambda i, j: _mx_rows(x[i:j], out[i:j], *numbers), len(x), pays=x.size > ROUNDED_ALONE)


def round_columns(x: NDArray[np.int16], out: NDArray[np.int16], kind: Type, borders: NDArray[np.int64]) -> None:
    """Round blocks along rows. borders: [blocks, 2], the first row of each block, and one past the last."""
    numbers = tuple(map(np.int32, kind))
    by_parts(lambda i, j: _columns(x, out, *numbers, borders[i:j]), len(borders), pays=x.size > ROUNDED_ALONE)


@njit(**OPTIONS)
def _magnitude(x: Any) -> Any:
    """Bits of |x|; 0 of a NaN."""
    bits = np.int32(x) & np.int32(0x7FFF)
    return np.int32(0) if bits > INFINITY else bits


@njit(**OPTIONS)
def _scales(amax: Any, largest: Any) -> Any:
    """Return 1 / scale and scale of a block."""
    code = max((amax >> np.int32(7)) - largest + np.int32((amax & np.int32(127)) > 96), np.int32(0))
    code = np.int32(254) if amax == INFINITY else code
    inverse = SUBNORMAL if code == 254 else (np.int32(254) - code) << np.int32(23)
    scale = SUBNORMAL if code == 0 else code << np.int32(23)
    return np.int32(inverse).view(np.float32), np.int32(scale).view(np.float32)


@njit(**OPTIONS)
def _rounded(x: Any, inverse: Any, scale: Any, least: Any, digits: Any) -> Any:
    whole = np.int32(x)
    bits = whole & np.int32(0x7FFF)
    y = np.int32(bits << np.int32(16)).view(np.float32) * inverse
    field = max(np.float32(y).view(np.int32) & np.int32(0x7F800000), (np.int32(127) - least) << np.int32(23))
    field = (field + ((np.int32(23) - digits) << np.int32(23))) & np.int32(0x7F800000)
    shift = np.int32(field | np.int32(0x400000)).view(np.float32)
    number = np.float32(np.float32(np.float32(y + shift) - shift) * scale)
    word = (np.float32(number).view(np.int32) >> np.int32(16)) | (whole & np.int32(-0x8000))
    return np.int16(whole if bits >= INFINITY else word)


@cpu_loop
def _mx_rows(x: Any, out: Any, largest: Any, least: Any, digits: Any) -> None:
    for i in range(x.shape[0]):
        for start in range(0, x.shape[1], BLOCK):
            block, into = x[i, start : start + BLOCK], out[i, start : start + BLOCK]
            amax = np.int32(0)
            for j in range(BLOCK):
                amax = max(amax, _magnitude(block[j]))
            inverse, scale = _scales(amax, largest)
            for j in range(BLOCK):
                into[j] = _rounded(block[j], inverse, scale, least, digits)


@cpu_loop
def _columns(x: Any, out: Any, largest: Any, least: Any, digits: Any, borders: Any) -> None:
    k = x.shape[1]
    amax, inverse, scale = np.empty(k, np.int32), np.empty(k, np.float32), np.empty(k, np.float32)
    for block in range(borders.shape[0]):
        amax[:] = 0
        for i in range(borders[block, 0], borders[block, 1]):
            row = x[i]
            for j in range(k):
                amax[j] = max(amax[j], _magnitude(row[j]))
        for j in range(k):
            inverse[j], scale[j] = _scales(amax[j], largest)
        for i in range(borders[block, 0], borders[block, 1]):
            row, into = x[i], out[i]
            for j in range(k):
                into[j] = _rounded(row[j], inverse[j], scale[j], least, digits)


UNROLLED = 8  # terms of an inner loop
FEW = 2**16  # numbers that one thread splits faster than another could start
NO_EXPONENT = -64  # of a zero: with any other below LEAST_TOP, and the sum of two fits 8 bits
LEAST_TOP = -40  # below every accumulator's exponent: a multiple of 2 ** (-20 - KEPT_BITS)
LOST = np.int32(-(1 << (23 - KEPT_BITS)))  # mask of an fp32 number's bits: KEPT_BITS after the leading one


class Fp8Rows(NamedTuple):
    """Left operand: values and exponents [m, k]; whether a block has a number that is not finite, [m, k / PROMOTED]."""

    values: NDArray[np.float32]
    exponents: NDArray[np.int8]
    special: NDArray[np.bool_]
    scales: NDArray[np.float32]


class Fp8Panels(NamedTuple):
    """Right operand in panels of WIDE rows, as columns: values, exponents [n / WIDE, k, WIDE]; special [n / WIDE,
    k / PROMOTED]; scales [n / WIDE, k / PROMOTED, WIDE]."""

    values: NDArray[np.float32]
    exponents: NDArray[np.int8]
    special: NDArray[np.bool_]
    scales: NDArray[np.float32]


def gemm(a: Quantized, b: Quantized) -> Tensor:
    """Compute a @ b^T, the fp32 output, on the rank's processors.

    a, b:    [m, k] and [n, k] on the CPU.
    returns: [m, n] fp32.
    raises TypeError, ValueError: as `fp8_sum.kind`.
    """
    blocks = kind(a, b)
    n, k = b.data.shape
    rows, panels = _rows(a), _panels(b)
    main = np.zeros((len(rows.values), len(panels.values) * WIDE), np.float32)

    def add(first: int, last: int) -> None:
        _add_blocks(*(array[first:last] for array in (main, *rows)), *panels, blocks == "1x128")

    by_parts(add, len(main), pays=len(main) * n * k > SMALL)
    total = torch.from_numpy(main)[:, :n]
    if blocks == "tensor":
        total = total * (a.scale.reshape(()) * b.scale.reshape(()))
    nothing = total.isnan()
    if nothing.any():
        total.view(torch.int32).masked_fill_(nothing, NAN)
    return total


def _rows(a: Quantized) -> Fp8Rows:
    values, exponents, special = _split(a.data, 1)
    scales = a.scale if a.blocks == "1x128" else torch.ones(special.shape)
    return Fp8Rows(values.squeeze(2), exponents.squeeze(2), special, scales.contiguous().numpy())


def _panels(b: Quantized) -> Fp8Panels:
    split = _split(b.data, WIDE)
    count, blocks = split[-1].shape
    scales = torch.ones(count * WIDE, blocks)
    if b.blocks == "1x128":
        scales[: len(b.data)] = b.scale
    if b.blocks == "128x128":
        scales = b.scale.repeat_interleave(WIDE, 0)
    panels = scales.view(count, WIDE, blocks).transpose(1, 2)
    return Fp8Panels(*split, panels.contiguous().numpy())


def _split(data: Tensor, width: int) -> tuple[Any, Any, Any]:
    """Split an operand on the rank's processors into panels of `width` rows, the last one filled up with zeros.

    returns: values and exponents, [panels, k, width], k padded to a multiple of STEP by zeros; whether blocks have a
             number that is not finite, [panels, k / PROMOTED].
    """
    numbers, tables = data.detach().contiguous().view(torch.uint8).numpy(), _tables(data.dtype)
    k, count = data.shape[1], -(-len(data) // width)
    padded = count, -(-k // STEP) * STEP, width
    special = np.zeros((count, -(-k // PROMOTED)), np.bool_)
    out = np.zeros(padded, np.float32), np.full(padded, NO_EXPONENT, np.int8), special

    def split(first: int, last: int) -> None:
        _split_loop(numbers[first * width : last * width], *tables, *(array[first:last] for array in out))

    by_parts(split, count, pays=numbers.size > FEW)
    return out


def _tables(dtype: torch.dtype) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    exponents = np.maximum(np.frexp(np.where(np.isfinite(values), values, 1))[1] - 1, LEAST[dtype])
    return values, np.where(values == 0, NO_EXPONENT, exponents).astype(np.int8)


@cpu_loop
def _split_loop(numbers: Any, value: Any, exponent: Any, values: Any, exponents: Any, special: Any) -> None:
    """[n, k] bytes → as `_split` returns it."""
    width = values.shape[2]
    for j in range(numbers.shape[0]):
        panel, column = j // width, j % width
        for t in range(numbers.shape[1]):
            values[panel, t, column] = value[numbers[j, t]]
            exponents[panel, t, column] = exponent[numbers[j, t]]
            special[panel, t // PROMOTED] |= not np.isfinite(value[numbers[j, t]])


@cpu_loop
def _add_blocks(
    main: Any, a: Any, ea: Any, special_a: Any, sa: Any, b: Any, eb: Any, special_b: Any, sb: Any, rows_first: Any
) -> None:
    """Add all blocks of all rows. main: [m, panels · WIDE] fp32; then `Fp8Rows` and `Fp8Panels`.

    rows_first: fma(p * sa, sb, main), and else fma(p, sa * sb, main), which with scales of 1 is main + p.
    """
    total, scale, back, specials = np.empty((4, WIDE), np.float32)
    work = scale, back, total.view(np.int32), scale.view(np.int32), back.view(np.int32)
    integers = np.empty(WIDE, np.int32), np.empty(WIDE, np.int8)
    for panel in range(b.shape[0]):
        for start in range(0, a.shape[1], PROMOTED):
            q, stop = start // PROMOTED, min(start + PROMOTED, a.shape[1])
            for i in range(a.shape[0]):
                out = main[i, panel * WIDE : (panel + 1) * WIDE]
                for j in range(WIDE):
                    total[j] = 0
                for k in range(start, stop, STEP):
                    _add_step(a[i], ea[i], b[panel], eb[panel], k, total, work, integers)
                if special_a[i, q] or special_b[panel, q]:
                    _add_specials(a[i], b[panel], start, stop, total, specials)
                s = sa[i, q]
                if rows_first:
                    for j in range(WIDE):
                        out[j] = fma(total[j] * s, sb[panel, q, j], out[j])  # type: ignore[call-arg]
                else:
                    for j in range(WIDE):
                        out[j] = fma(total[j], s * sb[panel, q, j], out[j])  # type: ignore[call-arg]


@njit(inline="always")
def _add_step(a: Any, ea: Any, b: Any, eb: Any, k: Any, total: Any, work: Any, integers: Any) -> None:
    """One step of one row and one panel. total: [WIDE] accumulators; work, integers: memory of `_add_blocks`."""
    (scale, back, bits, scale_bits, back_bits), (sums, top) = work, integers
    for j in range(WIDE):
        top[j] = np.int8(-128 if total[j] == 0 else ((bits[j] >> 23) & 255) - 127)
    for first in range(k, k + STEP, UNROLLED):
        for j in range(WIDE):
            highest = top[j]
            for t in range(UNROLLED):
                exponent = np.int8(ea[first + t] + eb[first + t, j])
                highest = exponent if exponent > highest else highest
            top[j] = highest
    for j in range(WIDE):
        high = max(np.int32(top[j]), np.int32(LEAST_TOP))
        scale_bits[j] = np.int32((np.int32(127 + KEPT_BITS) - high) << 23)
        back_bits[j] = np.int32((np.int32(127 - KEPT_BITS) + high) << 23)
    for j in range(WIDE):
        sums[j] = np.int32(total[j] * scale[j])
    for first in range(k, k + STEP, UNROLLED):
        for j in range(WIDE):
            unit = scale[j]
            term = sums[j]
            for t in range(UNROLLED):
                term += np.int32(a[first + t] * b[first + t, j] * unit)
            sums[j] = term
    for j in range(WIDE):
        total[j] = np.float32(sums[j])
    for j in range(WIDE):
        bits[j] = bits[j] & LOST
    for j in range(WIDE):
        total[j] = total[j] * back[j]


@njit(inline="always")
def _add_specials(a: Any, b: Any, start: Any, stop: Any, total: Any, specials: Any) -> None:
    for j in range(WIDE):
        specials[j] = 0
    for k in range(start, stop):
        for j in range(WIDE):
            specials[j] += a[k] * b[k, j]
    for j in range(WIDE):
        if not np.isfinite(specials[j]):
            total[j] = specials[j]
