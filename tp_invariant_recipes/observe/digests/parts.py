"""Sums over ranks that tell whether the ranks' parts of a tensor are the whole of it, and whether replicas agree.

Each is a few integers a tensor, whatever the number of ranks and parts.

    whole     sum of x^i over the positions i of all parts, replicas counted once, equals the one over all positions
    replicas  sum of c · lane over the holders of a part is 0 if all have the same lane, since their c add up to 0
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

from tp_invariant_recipes.kernels.digest import LANES
from tp_invariant_recipes.kernels.tensor_part import TablePlace

_PRIME = 2**61 - 1
# Two polynomials of degree below n that differ are equal at both with a probability of (n / 2^61)^2 (Schwartz, Zippel).
_POINTS = (0x1B873593CC9E2D51 % _PRIME, 0x0F4A7C159E3779B9 % _PRIME)
_LOW = 31  # bits; both halves of a number below 2^61 can be added 2^31 times
EXTENT = 2 * len(_POINTS)


@functools.lru_cache(maxsize=1 << 14)  # ranks have many parts of one form
def extent(place: TablePlace, columns: int) -> tuple[int, ...]:
    """EXTENT numbers that add up over parts. columns: of the whole tensor, seen as a table."""
    numbers: list[int] = []
    for x in _POINTS:
        start = pow(x, place.row * columns + place.column, _PRIME)
        rows = _geometric(pow(x, place.step * columns, _PRIME), place.rows)
        value = start * rows % _PRIME * _geometric(x, place.columns) % _PRIME
        numbers += [value & ((1 << _LOW) - 1), value >> _LOW]
    return tuple(numbers)


def is_whole(extents: Sequence[int], elements: int) -> bool:
    """Return whether parts whose extents have this sum hold each of so many elements exactly once."""
    sums = [extents[n] + (extents[n + 1] << _LOW) for n in range(0, EXTENT, 2)]
    return all(total % _PRIME == _geometric(x, elements) for total, x in zip(sums, _POINTS, strict=True))


def fits(place: TablePlace, shape: Sequence[int]) -> bool:
    """Return whether a place lies within a tensor of this shape."""
    rows, columns = math.prod(shape[:-1]), columns_of(shape)
    if min(place) < 0:
        return False
    return (
        not place.rows
        or not place.columns
        or (place.row + place.step * (place.rows - 1) < rows and place.column + place.columns <= columns)
    )


def columns_of(shape: Sequence[int]) -> int:
    """Of a tensor seen as a table."""
    return shape[-1] if shape else 1


def coefficients(keys: np.ndarray, count: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return the factors of this rank's lanes in the sums that compare replicas: int64 [parts, LANES].

    keys, count, before: of its parts, as `union.holders` has them. Of every part the factors of all holders add up to
    0 modulo 2^64. Each holder has an odd one in at least one lane: if it alone differs there, the sum is not 0.
    """
    values = np.zeros((len(keys), LANES), dtype=np.uint64)
    for n in np.flatnonzero(count > 1):
        numbers = before[n : n + 1] if before[n] else np.arange(1, count[n])  # the first's: what the others' lack to 0
        factors = _factors(int(keys[n]), numbers.astype(np.uint64), odd=bool(count[n] % 2))
        values[n] = factors[0] if before[n] else np.uint64(0) - factors.sum(0, dtype=np.uint64)
    return values.view(np.int64)


def _factors(key: int, numbers: np.ndarray, *, odd: bool) -> np.ndarray:
    """Of the holders with these numbers, from 1 on: uint64 [numbers, LANES]. odd: the number of holders is."""
    lanes = np.arange(1, LANES + 1, dtype=np.uint64)
    mixed = numbers[:, None] * np.uint64(0x9E3779B97F4A7C15) + lanes * np.uint64(0xD1B54A32D192ED03)
    mixed ^= np.uint64(key & (2**64 - 1))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # SplitMix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed |= np.uint64(1)
    if odd:  # then the first holder's would be even in both lanes: make another's even, in the last
        mixed[numbers == 1, -1] ^= np.uint64(1)
    return mixed


@functools.lru_cache(maxsize=1 << 14)
def _geometric(x: int, count: int) -> int:
    """1 + x + … + x^(count - 1) modulo the prime."""
    if x == 1:
        return count % _PRIME
    return (pow(x, count, _PRIME) - 1) * pow(x - 1, -1, _PRIME) % _PRIME
