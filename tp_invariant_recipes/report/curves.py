"""Curves over steps, reduced to blocks when a figure cannot show every step."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tp_invariant_recipes.ledger.bits import bits_float, ulp_distance
from tp_invariant_recipes.ledger.reader import Ledger

POINTS = 500  # of a curve


@dataclass(frozen=True)
class Curve:
    """Points of a curve, arrays of one length.

    x:         the step, or the middle of a block.
    y:         the value, or the median of a block. NaN: no finite value.
    low, high: the smallest and largest value of a block.
    block:     steps per point; 1: every step has its point.
    missing:   steps without a finite value.
    """

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    block: int
    missing: int


def curve(points: Iterable[tuple[int, float | None]]) -> Curve:
    """Make a curve from (step, value)."""
    pairs = np.array([(step, np.nan if value is None else value) for step, value in points], dtype=np.float64)
    steps, values = pairs.reshape(-1, 2).T.copy()
    values[~np.isfinite(values)] = np.nan
    block = max(1, -(-len(values) // POINTS))
    edges = range(0, len(values), block)
    parts = [values[start : start + block] for start in edges]
    parts = [part[np.isfinite(part)] for part in parts]
    return Curve(
        x=np.array([steps[start : start + block].mean() for start in edges]),
        y=np.array([np.median(part) if part.size else np.nan for part in parts]),
        low=np.array([part.min() if part.size else np.nan for part in parts]),
        high=np.array([part.max() if part.size else np.nan for part in parts]),
        block=block,
        missing=int(np.isnan(values).sum()),
    )


def recorded(ledger: Ledger, field: str) -> list[tuple[int, float | None]]:
    """(step, value) of one of the floats that the ledger records as exact bits."""
    texts = ((step.step, getattr(step, field)) for step in ledger.steps)
    return [(step, None if text is None else bits_float(text)) for step, text in texts]


def distances(a: Ledger, b: Ledger, field: str) -> list[tuple[int, float | None]]:
    """(step, ULP) of every common step. None: the bits differ, and one value is a NaN or missing."""
    pairs = (
        (record.step, getattr(record, field), getattr(other, field))
        for record, other in zip(a.steps, b.steps, strict=False)
    )
    return [
        (step, 0 if in_a == in_b else None if in_a is None or in_b is None else ulp_distance(in_a, in_b))
        for step, in_a, in_b in pairs
    ]
