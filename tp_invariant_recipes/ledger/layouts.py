"""The layouts that a run has had, and what else its resumes changed, by its ledger's header."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tp_invariant_recipes.ledger.schema import Header

_LAYOUT = "layout."
Span = tuple[int, str]  # the first step, and what holds from there on
_DEGREES = ("tp", "pp", "cp", "dp", "ep", "etp")


def words(degrees: Mapping[str, Any]) -> str:
    """Return the degrees above 1 as they are typed: "tp=2 dp=4"; "tp=1" where there is none."""
    counts = ((name, degrees.get(name)) for name in _DEGREES)
    return " ".join(f"{name}={count}" for name, count in counts if isinstance(count, int) and count > 1) or "tp=1"


def ranks(degrees: Mapping[str, Any]) -> int:
    """How many ranks a layout has."""
    return math.prod(int(degrees.get(name, 1)) for name in ("tp", "pp", "cp", "dp"))


def changes(header: Header) -> list[Span]:
    """Return the layouts; empty: the degrees never changed."""

    def layout(changed: Mapping[str, Any]) -> str:
        own = {name.removeprefix(_LAYOUT): value for name, value in changed.items() if name.startswith(_LAYOUT)}
        return words(header.layout | own)

    layouts = spans(header, layout)
    return layouts if len(layouts) > 1 else []


def spans(header: Header, value: Callable[[Mapping[str, Any]], str]) -> list[Span]:
    """(first step, value from there on) of what resumes have changed. value: of the fields that then differ."""
    values = [(1, value({}))]
    for entry in header.notes.get("resumed", ()):
        later = value(entry["changed"])
        if later != values[-1][1]:
            values.append((entry["after_step"] + 1, later))
    return values


def spans_in_words(values: Sequence[Span]) -> str:
    """Such as "tp=2, from step 5 on tp=4"."""
    (_, first), *later = values
    return ", ".join([first, *(f"from step {step} on {value}" for step, value in later)])
