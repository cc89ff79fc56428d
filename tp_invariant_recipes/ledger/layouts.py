"""The layouts that a run has had, by its ledger's header, in words."""

import math
from collections.abc import Mapping
from typing import Any

from tp_invariant_recipes.ledger.schema import Header

_FIELD = "layout."
_DEGREES = ("tp", "pp", "cp", "dp", "ep", "etp")


def words(degrees: Mapping[str, Any]) -> str:
    """Return the degrees above 1 as they are typed: "tp=2 dp=4"; "tp=1" where there is none."""
    counts = ((name, degrees.get(name)) for name in _DEGREES)
    return " ".join(f"{name}={count}" for name, count in counts if isinstance(count, int) and count > 1) or "tp=1"


def ranks(degrees: Mapping[str, Any]) -> int:
    """How many ranks a layout has."""
    return math.prod(int(degrees.get(name, 1)) for name in ("tp", "pp", "cp", "dp"))


def changes(header: Header) -> list[tuple[int, str]]:
    """(first step, layout from there on) wherever the degrees changed; empty: they never did."""
    layouts = [(1, words(header.layout))]
    for entry in header.notes.get("resumed", ()):
        changed = {
            name.removeprefix(_FIELD): value for name, value in entry["changed"].items() if name.startswith(_FIELD)
        }
        later = words(header.layout | changed)
        if later != layouts[-1][1]:
            layouts.append((entry["after_step"] + 1, later))
    return layouts if len(layouts) > 1 else []
