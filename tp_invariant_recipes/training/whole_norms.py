"""Norms of whole gradients from the squares of the parts that ranks hold."""

import math
from collections.abc import Iterable

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.training.shards import GlobalSlice, covers

# Of a part of a gradient: its parameter, the shape of that, its place in it, the sum of its squares.
SquaredPart = tuple[str, tuple[int, ...], GlobalSlice, float]


def whole_norms(parts: Iterable[SquaredPart]) -> dict[str, float]:
    """Parameter → the norm of all of it. Raises RunError when the parts are not the whole, each element once."""
    found: dict[str, dict[GlobalSlice, float]] = {}
    shapes = {}
    for name, shape, place, square in parts:
        found.setdefault(name, {}).setdefault(place, square)
        shapes[name] = shape
    wrong = [name for name, places in found.items() if not covers(places, shapes[name])]
    if wrong:
        raise RunError(f"an audit cannot tell whose these gradients are: {', '.join(wrong[:5])}")
    # In one order, so that equal parts have equal sums.
    return {name: math.sqrt(math.fsum(found[name][place] for place in sorted(found[name]))) for name in sorted(found)}
