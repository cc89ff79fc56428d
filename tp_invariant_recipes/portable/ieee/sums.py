"""Sums of a row in a stated order, the same on every machine.

    fold     n numbers, n a power of two: the upper half is added to the lower half until one number is left.
    a row    is filled with +0.0 to the next power of two, then folded.
    in lanes number i of a row is added to lane i % L, which starts at +0.0, in the order of i; the lanes are folded.

A fold adds vectors, so a CPU and a GPU both do it fast, and L lanes need no more memory than L numbers.
"""

from typing import Any

import triton
import triton.language as tl
from numba import njit


def power_of_two(n: int) -> int:
    """Return the least power of two that is not below n > 0."""
    return 1 << (n - 1).bit_length()


@triton.jit
def fold_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] → [ROWS]; COLUMNS is a power of two. A sum of two numbers has no order."""
    LEVELS: tl.constexpr = COLUMNS.bit_length() - 1
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, [ROWS, 2, COLUMNS >> (level + 1)]), 1)
    return tl.reshape(x, [ROWS])


@triton.jit
def fold_rows(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] → [COLUMNS]; ROWS is a power of two."""
    LEVELS: tl.constexpr = ROWS.bit_length() - 1
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, [2, ROWS >> (level + 1), COLUMNS]), 0)
    return tl.reshape(x, [COLUMNS])


@njit(nogil=True, error_model="numpy")
def numba_fold(values: Any) -> Any:
    """[n] fp32, n a power of two → the sum. The upper half stays as it is, what lies below it does not."""
    n = values.size
    while n > 1:
        n //= 2
        low, high = values[:n], values[n : 2 * n]
        for i in range(n):
            low[i] += high[i]
    return values[0]


@njit(nogil=True, error_model="numpy")
def numba_fold_rows(values: Any) -> Any:
    """[n, columns] fp32, n a power of two → its first row, which then has the sum."""
    n = values.shape[0]
    while n > 1:
        n //= 2
        for i in range(n):
            low, high = values[i], values[i + n]
            for j in range(low.size):
                low[j] += high[j]
    return values[0]
