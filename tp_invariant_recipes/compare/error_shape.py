"""The shape of an error: what a wrong tensor is, compared with the right one."""

import math
from collections.abc import Sequence

import numpy as np

from tp_invariant_recipes.ledger.dumps import RankPart

SAMPLED = 512  # rows of a piece that are looked for elsewhere
CLOSE = 0.03  # what is left of an error may be so large, relative to the tensor, where its shape explains it
NAMED = {2.0: "added twice", 0.5: "half is missing", -1.0: "the sign"}


def shape_of(
    pieces: Sequence[RankPart], reference: np.ndarray, noise: float, allowed: float, wrong: Sequence[int]
) -> str | None:
    """Return the shape of a tensor's error in words; None: none is known.

    reference: the right tensor [rows, columns]. noise: the mean square of what rounding does to it.
    allowed:   RMS that may be left. wrong: the ranks whose parts are wrong.
    """
    held = [piece for piece in pieces if piece.rank in wrong]
    others = sorted({piece.rank for piece in pieces} - set(wrong))
    values = np.concatenate([piece.values.ravel() for piece in held])
    expected = np.concatenate([piece.slice_of(reference).ravel() for piece in held])
    allowed = max(allowed, CLOSE * rms(expected), 4 * math.sqrt(noise))
    where = f", right on ranks {', '.join(map(str, others))}" if others else ""
    if not np.isfinite(values).all():
        return f"not finite numbers{where}"
    if not values.any():
        return f"zero{where}"
    if not expected.any():
        return f"not zero, as in the reference{where}"
    ratio = float(values @ expected / (expected @ expected))
    if rms(values - ratio * expected) <= abs(ratio) * allowed:
        return f"{_ratio_words(ratio, len({piece.rank for piece in pieces}))}{where}"
    return _parts(pieces, reference, allowed) or _moved(held, reference, allowed) or _zero_rows(held, reference, where)


def _ratio_words(ratio: float, ranks: int) -> str:
    names = NAMED | {1 / n: f"1/{n}" for n in range(3, 65)} | {float(n): f"added {n} times" for n in range(3, 65)}
    near = min(names, key=lambda value: abs(ratio / value - 1))
    meaning = f" ({names[near]})" if abs(ratio / near - 1) < CLOSE else ""
    return f"constant ratio {ratio:.3g}{meaning}"


def _parts(pieces: Sequence[RankPart], reference: np.ndarray, allowed: float) -> str | None:
    """Replicas that differ and whose sum, or mean, is the right tensor."""
    places: dict[tuple[int, int, tuple[int, ...]], list[RankPart]] = {}
    for piece in pieces:
        places.setdefault((piece.part.row, piece.part.column, piece.values.shape), []).append(piece)
    groups = list(places.values())
    ranks = len(groups[0])
    if ranks < 2 or any(len(group) != ranks for group in groups):
        return None
    expected = np.concatenate([group[0].slice_of(reference).ravel() for group in groups])
    total = np.concatenate([np.sum([piece.values for piece in group], axis=0).ravel() for group in groups])
    for whole, words in ((total, "sum"), (total / ranks, "mean")):
        if rms(whole - expected) <= allowed:
            return f"each rank has a part: the {words} over {ranks} ranks is right"
    return None


def _moved(held: Sequence[RankPart], reference: np.ndarray, allowed: float) -> str | None:
    """Rows that are right in another place, or a transposed table."""
    square = all(piece.values.shape == reference.shape == reference.T.shape for piece in held)
    if square and all(rms(piece.values - reference.T) <= allowed for piece in held):
        return "transposed"
    if reference.shape[1] < 8:
        return None
    shifts = set()
    for piece in held:
        columns = reference[:, piece.part.column : piece.part.column + piece.values.shape[1]]
        places = set()
        for row in range(0, len(piece.values), max(1, len(piece.values) // SAMPLED)):
            far = np.square(columns - piece.values[row]).mean(1)
            nearest = int(far.argmin())
            if math.sqrt(far[nearest]) > allowed:
                return None
            if nearest in places:  # two rows in one place: no order of the right rows
                return None
            places.add(nearest)
            shifts.add(nearest - (piece.part.row + row * piece.part.step))
    if not shifts - {0}:
        return None
    height = len(reference)
    around = {(shift + height // 2) % height - height // 2 for shift in shifts}  # the ends may be joined
    return f"rows shifted by {around.pop()}" if len(around) == 1 else "rows in another order"


def _zero_rows(held: Sequence[RankPart], reference: np.ndarray, where: str) -> str | None:
    """Rows that are missing, or the only ones that are wrong."""
    rows = sum(len(piece.values) for piece in held)
    zero = sum(int((~piece.values.any(1) & piece.slice_of(reference).any(1)).sum()) for piece in held)
    if zero:
        return f"{zero} of {rows} rows are zero{where}"
    return f"wrong on some ranks alone{where}" if where else None


def rms(x: np.ndarray) -> float:
    """Root of the mean square; 0 of nothing."""
    return math.sqrt(float(np.square(x).mean())) if x.size else 0.0
