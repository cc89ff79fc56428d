# SPDX-License-Identifier: Apache-2.0
"""The distance between two runs' dumps of the tensor at which they first differ."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tp_invariant_recipes.comparison.compare import Comparison
from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.text import plural

if TYPE_CHECKING:
    from tp_invariant_recipes.ledger.dumps import Distance

DUMPED = ("forward", "backward", "gradients", "masters", "weights")  # kinds of difference that concern a tensor


def magnitude(comparison: Comparison) -> "Distance | None":
    """Return the distance of the first differing tensor. None: it is no tensor, or a run did not dump it at that step.

    LedgerError: dumps are damaged, or their shapes differ.
    """
    first = comparison.first
    runs = [ledger.run_directory for ledger in (comparison.a, comparison.b)]
    if first is None or first.kind not in DUMPED or not all(run and (run / "dumps").is_dir() for run in runs):
        return None
    from tp_invariant_recipes.ledger import dumps  # needs numpy, and few comparisons have dumps

    if not all(first.step in dumps.steps(run) for run in runs if run):
        return None
    in_a, in_b = (dumps.read_step(run, first.step) for run in runs if run)
    if not (first.name in in_a.parts and first.name in in_b.parts):
        return None
    return dumps.distance(in_a.read(first.name), in_b.read(first.name))


def magnitude_line(comparison: Comparison) -> str | None:
    """Return the distance in words, or the reason why the dumps do not show it. None: there are no dumps."""
    try:
        distance = magnitude(comparison)
    except LedgerError as error:
        return f"the dumps do not show how far apart: {error}"
    if distance is None:
        return None
    parts = [f"{distance.differing} of {plural(distance.total, 'element')} differ"]
    if distance.max_ulp is not None:
        parts.append(f"by at most {distance.max_ulp} ULP and {distance.max_difference:.3g}")
    if distance.nans:
        parts.append(f"{distance.nans} of them with a NaN")
    if distance.first is not None:
        parts.append(f"the first at {list(distance.first)}")
    return ", ".join(parts)


def magnitude_report(comparison: Comparison) -> dict[str, Any] | None:
    """Return the distance as JSON: the fields of `dumps.Distance`, or `error`; None: there are no dumps."""
    try:
        distance = magnitude(comparison)
    except LedgerError as error:
        return {"error": str(error)}
    return None if distance is None else asdict(distance)
