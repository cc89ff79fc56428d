# SPDX-License-Identifier: Apache-2.0
"""The initial weights of numerics/megatron/init.py on a CPU, compiled with numba: its operations, number by number."""

from typing import Any

import numpy as np
from numba import njit
from numba.extending import register_jitable
from numpy.typing import NDArray

from tp_invariant_recipes.kernels import normal_quantile
from tp_invariant_recipes.kernels.cpu.cpu_threads import by_parts
from tp_invariant_recipes.kernels.cpu.numba_loop import OPTIONS, cpu_loop
from tp_invariant_recipes.kernels.normal_quantile import (
    MOST_CENTRAL,
    MOST_NEAR,
    ROOT_HALF,
    bits_of,
    central,
    far,
    log_of,
    near,
    philox4x32,
)

AT_ONCE = 1024  # numbers of a row whose bits and quantiles are computed in turn

for shared in (philox4x32, bits_of, normal_quantile.horner, normal_quantile.ratio, central, near, far, log_of):
    register_jitable(**OPTIONS)(shared)


def fill_normal(
    out: NDArray[np.float32], rows: NDArray[np.int64], first: int, key: int, seed: int, std: float, mean: float
) -> None:
    """Fill out with columns first, first + 1, … of some rows of a tensor.

    out: [rows, columns]. key, seed: as of `init._bits`, 64 bits.
    """
    words = tuple(part for number in (key, seed) for part in (number & 0xFFFFFFFF, number >> 32))
    by_parts(lambda i, j: _fill(out[i:j], rows[i:j], first, words, std, mean), len(rows), pays=out.size > AT_ONCE)


@njit(**OPTIONS)
def _log(x: Any) -> Any:
    word = np.float64(x).view(np.int64)
    m = np.int64((word & np.int64(0x000FFFFFFFFFFFFF)) | np.int64(0x3FE0000000000000)).view(np.float64)
    e = np.float64((word >> np.int64(52)) - np.int64(1022))
    if m < ROOT_HALF:
        m, e = m * 2.0, e - 1.0
    return log_of(m, e)


@njit(**OPTIONS)
def _outer(q: Any, tail: Any) -> Any:
    """Quantiles beyond the central ones."""
    r = np.sqrt(-_log(tail))
    distance = far(r) if r > MOST_NEAR else near(r)
    return -distance if q < 0 else distance


@cpu_loop
def _fill(out: Any, rows: Any, first: Any, words: Any, std: Any, mean: Any) -> None:
    """As `fill_normal`."""
    odds, values = np.empty(AT_ONCE + 2, np.int64), np.empty(AT_ONCE, np.float64)
    scale, half, whole = 2.0**-53, np.int64(1) << np.int64(52), np.int64(1) << np.int64(53)
    for i in range(out.shape[0]):
        for start in range(0, out.shape[1], AT_ONCE):
            count, column = min(AT_ONCE, out.shape[1] - start), first + start
            for pair in range((count + column % 2 + 1) // 2):
                w = philox4x32((column // 2 + pair, rows[i], words[2], words[3]), (words[0], words[1]))
                odds[2 * pair], odds[2 * pair + 1] = 2 * bits_of(w[0], w[1]) + 1, 2 * bits_of(w[2], w[3]) + 1
            odd = odds[column % 2 : column % 2 + count]
            for j in range(count):
                values[j] = central(np.float64(odd[j] - half) * scale)
            for j in range(count):
                q = np.float64(odd[j] - half) * scale
                if abs(q) > MOST_CENTRAL:
                    values[j] = _outer(q, np.float64(min(odd[j], whole - odd[j])) * scale)
            for j in range(count):
                out[i, start + j] = np.float32(values[j] * std + mean)
