"""The rounding of kernels/products/mxfp8.py on a CPU, compiled with numba: its `_to_mx`, number by number."""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tp_invariant_recipes.kernels.cpu.cpu_threads import by_parts
from tp_invariant_recipes.kernels.cpu.numba_loop import OPTIONS, cpu_loop

SMALL = 2**18  # numbers that one thread rounds faster than another could start
BLOCK = 32
INFINITY = np.int32(0x7F80)  # bits of bf16
SUBNORMAL = np.int32(0x00400000)  # bits of 2 ** -127 in fp32
Type = tuple[int, int, int]


def round_rows(x: NDArray[np.int16], out: NDArray[np.int16], kind: Type) -> None:
    """Round blocks of 32 along k. x, out: [rows, k], bits of bf16. kind: of `mxfp8.TYPES`."""
    numbers = tuple(map(np.int32, kind))
    by_parts(lambda i, j: _rows(x[i:j], out[i:j], *numbers), len(x), pays=x.size > SMALL)


def round_columns(x: NDArray[np.int16], out: NDArray[np.int16], kind: Type, borders: NDArray[np.int64]) -> None:
    """Round blocks along rows. borders: [blocks, 2], the first row of each block, and one past the last."""
    numbers = tuple(map(np.int32, kind))
    by_parts(lambda i, j: _columns(x, out, *numbers, borders[i:j]), len(borders), pays=x.size > SMALL)


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
def _rows(x: Any, out: Any, largest: Any, least: Any, digits: Any) -> None:
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
