# SPDX-License-Identifier: Apache-2.0
"""Whether a reported gradient norm is the norm of the recorded gradients, and what it counts otherwise.

An optimizer adds squares in fp32, which is exact to some 10⁻⁶, so that even a few parameters show that are left out.
"""

import math
import re
from collections.abc import Iterator

import numpy as np

from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.ledger.dumps import GRADIENT_NORM, Dumps, Table

ROUNDED = 2.0**-18  # a ratio may be so far from 1 in units of an audit's factor
EXPLAINED = 2.0**-21  # the same, where the squares of a kind of parameters explain it
CLOSE = 0.1  # a difference of squares is explained by a sum that is so near to it
CACHED = 2**17  # elements that are read at a time
_LAYER = re.compile(r"(?<=\.)[0-9]+(?=\.)")


def distance(run: Dumps, reference: Dumps) -> tuple[float, str | None]:
    """Return how far a run's norm is from its gradients' in an audit's units, and what it counts otherwise in words."""
    own, expected = ratio(run), ratio(reference)
    if not own or not expected:
        return 0.0, None
    far, rounding = abs(own / expected - 1), abs(expected - 1)
    counted = counted_otherwise(run) if far > max(EXPLAINED, rounding) else None
    return far / max(EXPLAINED if counted else ROUNDED, rounding), counted


def ratio(run: Dumps) -> float | None:
    """Return the reported norm divided by its gradients' norm; None: not all are whole, or all are 0."""
    try:
        squares = [square(run.table(name)) for name in _gradients(run)]
    except LedgerError:
        return None
    norm = math.sqrt(math.fsum(squares))
    return float(run.values(GRADIENT_NORM)[0, 0]) / norm if norm else None


def counted_otherwise(run: Dumps) -> str | None:
    """Which parameters the norm leaves out, or counts several times, in words; None: no kind alone explains it."""
    whole: dict[str, float] = {}
    first: dict[str, float] = {}  # the parts of the first rank that has any
    ranks = 1
    for name in _gradients(run):
        kind = _LAYER.sub("*", name.removeprefix("gradients/"))
        pieces = run.pieces(name)
        ranks = max(ranks, len({piece.rank for piece in pieces}))
        whole[kind] = whole.get(kind, 0.0) + square(run.table(name))
        lowest = [piece.values for piece in pieces if piece.rank == pieces[0].rank]
        first[kind] = first.get(kind, 0.0) + sum(float(np.square(values).sum()) for values in lowest)
    missing = float(run.values(GRADIENT_NORM)[0, 0]) ** 2 - math.fsum(whole.values())
    reasons: dict[str, float] = {}
    for kind, total in whole.items():
        reasons[f"it leaves {kind} out"] = -total
        reasons[f"of {kind} it counts the part of one rank alone"] = first[kind] - total
        reasons |= {f"it counts {kind} {times} times": (times - 1) * total for times in range(2, ranks + 1)}
    nearest = min(reasons, key=lambda words: abs(reasons[words] - missing), default=None)
    near = nearest is not None and abs(reasons[nearest] - missing) <= CLOSE * abs(missing)
    return nearest if near else None


def square(table: Table) -> float:
    """Return the sum of the squares of a table, some rows at a time."""
    height, width = table.shape
    return math.fsum(float(np.square(table[rows]).sum()) for rows in blocks(height, width))


def blocks(height: int, width: int) -> Iterator[slice]:
    """Return the rows of a table, as many at a time as a processor's cache holds."""
    block = max(1, CACHED // max(1, width))
    return (slice(start, min(height, start + block)) for start in range(0, height, block))


def _gradients(run: Dumps) -> list[str]:
    return [name for name in run.parts if name.startswith("gradients/")]
