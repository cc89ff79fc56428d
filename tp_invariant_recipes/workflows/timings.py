"""The statistics of a benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some numbers."""

    median: float
    min: float
    max: float


def spread(values: Sequence[float]) -> Spread:
    """Median, smallest and largest. Raises StatisticsError when there are none."""
    return Spread(median(values), min(values), max(values))


def slowest(ranks: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The time of every step: the longest time of any rank.

    ranks: seconds of each step, one sequence per rank. Raises ValueError when their lengths differ.
    """
    return tuple(max(step) for step in zip(*ranks, strict=True))


def ratio(first: Sequence[float], other: Sequence[float]) -> Spread:
    """`other` / `first`, one ratio per round, so that anything that slows a whole round down cancels out.

    first, other: one number for each round. Raises ValueError when their lengths differ.
    """
    return spread([b / a for a, b in zip(first, other, strict=True)])
