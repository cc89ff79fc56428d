# SPDX-License-Identifier: Apache-2.0
"""Rotary positions in stated IEEE arithmetic: a CPU and every GPU give the same bits.

The tables are made once, on the CPU, in fp64, and rounded to fp32:

    frequency i  the fp64 number nearest to base^(-2i / dim)         decimal's power, to 50 digits
    scaled       as Llama 3.1 or YaRN does, in fp64, every operation rounded once; or not
    angle        position * frequency, rounded once
    cos, sin     of the angle: n pi/2 taken off in three parts (Cody and Waite), then the polynomials of FreeBSD's
                 k_cos.c and k_sin.c; every operation rounded once. In ULP of fp32 the error is below 0.501.

With x in two halves (not interleaved), in fp32, each operation rounded once, the results rounded once to x's dtype:

    y1 = x1 cos - x2 sin        dx1 = dy1 cos + dy2 sin
    y2 = x2 cos + x1 sin        dx2 = dy2 cos - dy1 sin
"""

import math
from decimal import Decimal, localcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from tp_invariant_recipes.kernels.cpu.numba_loop import cpu_loop
from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.portable.ieee.math import power_of_two
from tp_invariant_recipes.portable.ieee.storage import load_fp32, store_rounded, stored, widened
from tp_invariant_recipes.portable.shared_source import UNFUSED, as_stored, elementwise, fill, numba_version

TILE = 4096
LARGEST_ANGLE = 2.0**20
ORIGINAL_LENGTH, LOW, HIGH = 8192, 1, 4  # of Llama 3.1: positions, and the turns in them between which scaling fades

_PI = Decimal("3.14159265358979323846264338327950288419716939937510")
_TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
_HALF_PI = tuple(
    map(float.fromhex, ("0x1.921fb544p+0", "0x1.0b4611a6p-34", "0x1.3198a2e037073p-69"))
)  # 33, 33, 53 bits
_COS = (
    4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05,
    -2.75573143513906633035e-07, 2.08757232129817482790e-09, -1.13596475577881948265e-11,
)  # fmt: skip
_SIN = (
    -1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04,
    2.75573137070700676789e-06, -2.50507602534068634195e-08, 1.58969099521155010221e-10,
)  # fmt: skip


class Yarn(NamedTuple):
    """Positions beyond those of a model's first training (Peng et al., "YaRN", 2023), as multi-latent attention has it.

    factor: of wavelengths. original: positions of that training. fast, slow: turns in them between which scaling fades.
    """

    factor: float
    original: int
    fast: float
    slow: float


@cache
def tables(
    length: int, dim: int, base: float, scaling: float | Yarn | None = None, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """cos and sin of the positions 0 to length - 1: [length, dim / 2] each, fp32, on a device. Do not change them.

    dim:     how many numbers of a head are rotated, even. base: `rotary_base`.
    scaling: `rope_scaling_factor` of Llama 3.1, or YaRN's numbers; None: frequencies are not scaled.
    """
    frequencies = _frequencies(dim, base)
    if isinstance(scaling, Yarn):
        frequencies = _scaled_by_yarn(frequencies, base, scaling)
    elif scaling is not None:
        frequencies = _scaled(frequencies, scaling)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies[None, :]
    sin, cos = sin_cos(angles)
    return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)


def _frequencies(dim: int, base: float) -> NDArray[np.float64]:
    with localcontext() as context:
        context.prec = 50
        return np.array([float(Decimal(base) ** (Decimal(-i) / Decimal(dim))) for i in range(0, dim, 2)])


def _scaled(frequencies: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
    """Those of Llama 3.1 (Megatron-Core: RotaryEmbedding._apply_scaling); every operation rounded once."""
    wavelengths = 2 * math.pi / frequencies
    share = (ORIGINAL_LENGTH / wavelengths - LOW) / (HIGH - LOW)
    between = (1 - share) * frequencies / factor + share * frequencies
    short, long = wavelengths < ORIGINAL_LENGTH / HIGH, wavelengths > ORIGINAL_LENGTH / LOW
    return np.where(short, frequencies, np.where(long, frequencies / factor, between))


def _scaled_by_yarn(frequencies: NDArray[np.float64], base: float, yarn: Yarn) -> NDArray[np.float64]:
    """Those of Megatron-Core's YarnRotaryEmbedding; every operation rounded once. The range has whole ends."""
    half = len(frequencies)
    with localcontext() as context:
        context.prec = 50
        places = [
            half * (Decimal(yarn.original) / (2 * _PI * Decimal(turns))).ln() / Decimal(base).ln()
            for turns in (yarn.fast, yarn.slow)
        ]
    low, high = max(math.floor(places[0]), 0), min(math.ceil(places[1]), 2 * half - 1)
    scaled = np.clip((np.arange(half, dtype=np.float64) - low) / (high - low or 0.001), 0, 1)
    return frequencies / yarn.factor * scaled + frequencies * (1 - scaled)


def sin_cos(x: NDArray[np.float64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """sin(x) and cos(x), fp32. Raises ValueError: an angle beyond LARGEST_ANGLE, or NaN."""
    if x.size and not np.abs(x).max() <= LARGEST_ANGLE:
        raise ValueError(f"angles up to {LARGEST_ANGLE:g} have a sine here; these go up to {np.abs(x).max():g}")
    n = np.rint(x * _TWO_OVER_PI)
    r = ((x - n * _HALF_PI[0]) - n * _HALF_PI[1]) - n * _HALF_PI[2]
    z = r * r
    cos = 1.0 - (z * 0.5 - z * z * _series(z, _COS))
    sin = r + r * (z * _series(z, _SIN))
    quarter = n.astype(np.int64) & 3
    odd = (quarter & 1) == 1
    sine, cosine = np.where(odd, cos, sin), np.where(odd, sin, cos)
    sine = np.where(quarter >= 2, -sine, sine)
    cosine = np.where((quarter == 1) | (quarter == 2), -cosine, cosine)
    return sine.astype(np.float32), cosine.astype(np.float32)


def _series(z: NDArray[np.float64], coefficients: tuple[float, ...]) -> NDArray[np.float64]:
    total = np.full_like(z, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = total * z + coefficient
    return total


def rotate(x: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> Tensor:
    """x rotated by the positions' angles; backward: the gradient of x for x as gradient.

    x:        [s, b, heads, d] bf16 or fp32; the first 2k of d are rotated, the others stay.
    cos, sin: [s or more, k] fp32, contiguous, on x's device.
    returns:  x's shape and dtype, contiguous.
    """
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sin = -sin if backward else sin
    tensors = (x.flatten(1, -2), cos[: len(x)], sin[: len(x)], y.flatten(1, -2))
    fill(rotate_triton, _rotate_loop, tensors, work=x.numel())
    return y


@elementwise
def rotated(x1, x2, cos, sin):
    """Return the pair (x1, x2), rotated."""
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


_rotated = numba_version("rotated")


@cpu_loop
def _rotate_loop(x: Any, cos: Any, sin: Any, y: Any) -> None:
    half = cos.shape[1]
    for position in range(x.shape[0]):
        c, s = cos[position], sin[position]
        for row in range(x.shape[1]):
            x1, x2, rest = x[position, row, :half], x[position, row, half : 2 * half], x[position, row, 2 * half :]
            y1, y2, out = y[position, row, :half], y[position, row, half : 2 * half], y[position, row, 2 * half :]
            for i in range(half):
                a, b = _rotated(widened(x1[i]), widened(x2[i]), c[i], s[i])
                y1[i], y2[i] = stored(a, y), stored(b, y)
            for i in range(rest.size):
                out[i] = stored(widened(rest[i]), y)


def rotate_triton(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor) -> None:
    """Fill y. All contiguous; Triton's interpreter takes CPU tensors."""
    width, half = x.shape[-1], cos.shape[1]
    rows = x.numel() // width
    columns, rest = power_of_two(half), power_of_two(max(1, width - 2 * half))
    tile = max(1, TILE // columns)
    constants = (half, width, columns, rest, tile)
    tensors = (as_stored(x), cos, sin, as_stored(y))
    ROTATE.launch((triton.cdiv(rows, tile), 1), tensors, (rows, rows // x.shape[0]), constants)


@triton.jit(do_not_specialize=["rows", "rows_of_position"])
def _ieee_rotary(
    x, cos, sin, y, rows, rows_of_position,
    HALF: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < HALF)[None, :]
    at = (row * WIDTH)[:, None] + column[None, :]
    angle = (row // rows_of_position * HALF)[:, None] + column[None, :]
    c, s = tl.load(cos + angle, mask=inside, other=0.0), tl.load(sin + angle, mask=inside, other=0.0)
    y1, y2 = rotated(load_fp32(x + at, inside), load_fp32(x + at + HALF, inside), c, s)
    store_rounded(y + at, y1, inside)
    store_rounded(y + at + HALF, y2, inside)
    if WIDTH > 2 * HALF:
        column = 2 * HALF + tl.arange(0, REST)
        at = (row * WIDTH)[:, None] + column[None, :]
        rest = (row < rows)[:, None] & (column < WIDTH)[None, :]
        store_rounded(y + at, load_fp32(x + at, rest), rest)


ROTATE = Kernel(_ieee_rotary, **UNFUSED)
