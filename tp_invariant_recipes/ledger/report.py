"""A comparison in words for people, and as one JSON object for machines."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tp_invariant_recipes.ledger.bits import readable
from tp_invariant_recipes.ledger.compare import FIELDS, UNREADABLE, Comparison, FirstDifference, Verdict
from tp_invariant_recipes.ledger.lines import Difference
from tp_invariant_recipes.ledger.reader import FILE_NAME, Ledger

REPORT_SCHEMA = 1
LIMITS = "Weights and gradients themselves are not compared: ledgers do not record digests of them yet."

_FIELDS_IN_LINE = 3  # further fields are in the table below the line
_NOT_SET = "not set"


def run_name(ledger: Ledger) -> Path:
    """What people call a ledger: its run directory, or the file where it has another name."""
    return ledger.path.parent if ledger.path.name == FILE_NAME else ledger.path


def verdict_line(comparison: Comparison) -> str:
    """The whole result in one line."""
    return f"{comparison.verdict.value}{_LINES[comparison.verdict](comparison)}"


def remarks(comparison: Comparison) -> tuple[str, ...]:
    """What a reader must know to judge the verdict; one sentence each."""
    a, b = comparison.a, comparison.b
    sentences = [
        f"{run_name(ledger)}: the last line is torn; the run was killed, or is writing it now."
        for ledger in (a, b)
        if ledger.torn
    ]
    if a.path.resolve() == b.path.resolve():
        sentences.append("Both are the same file, so this proves nothing.")
    if comparison.verdict is Verdict.IDENTICAL:
        sentences.append(LIMITS)
    return tuple(sentences)


def header_rows(comparison: Comparison) -> tuple[tuple[str, str, str], ...]:
    """The header fields that differ, those that make the runs incomparable first: name and both values."""
    return tuple((d.field, d.a or _NOT_SET, d.b or _NOT_SET) for d in comparison.refused + comparison.informed)


def exit_status(comparisons: Iterable[Comparison]) -> int:
    """The worst of several: one incomparable run outweighs a different one."""
    return max(comparison.exit_status for comparison in comparisons)


def report(comparisons: tuple[Comparison, ...]) -> dict:
    """Everything, as JSON; all comparisons are with one first run. Documented in docs/ledger.md."""
    return {
        "schema": REPORT_SCHEMA,
        "exit_status": exit_status(comparisons),
        "error": None,
        "compared_fields": [field.name for field in FIELDS],
        "comparisons": [_one(comparison) for comparison in comparisons],
    }


def error_report(error: Exception) -> dict:
    """The report where a ledger could not be read."""
    start = {"schema": REPORT_SCHEMA, "exit_status": UNREADABLE, "error": str(error)}
    return start | {"compared_fields": [], "comparisons": []}


def _one(comparison: Comparison) -> dict:
    return {
        "a": _ledger(comparison.a),
        "b": _ledger(comparison.b),
        "verdict": comparison.verdict.value,
        "text": verdict_line(comparison),
        "remarks": list(remarks(comparison)),
        "steps_compared": comparison.steps_compared,
        "steps_differing": comparison.steps_differing,
        "steps_skipped": comparison.steps_skipped,
        "first_difference": _first(comparison.first) if comparison.first else None,
        "refused": [_difference(difference) for difference in comparison.refused],
        "informed": [_difference(difference) for difference in comparison.informed],
    }


def _ledger(ledger: Ledger) -> dict:
    return {
        "path": str(ledger.path),
        "steps": len(ledger.steps),
        "torn": ledger.torn,
        "identity_hash": ledger.header.identity_hash,
    }


def _first(first: FirstDifference) -> dict:
    values = {"a": _value(first, first.a), "b": _value(first, first.b)}
    return {"step": first.step, "field": first.field.name, "phase": first.field.phase, **values, "ulp": first.ulp}


def _value(first: FirstDifference, value: Any) -> Any:
    if first.field.is_float and value is not None:
        return {"bits": value, "value": readable(value)}
    return value


def _difference(difference: Difference) -> dict:
    """A side that does not have the field has no key, since null is a value."""
    sides = {"a": difference.a, "b": difference.b}
    return {"field": difference.field} | {side: json.loads(text) for side, text in sides.items() if text is not None}


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def _identical(comparison: Comparison) -> str:
    compared, total = comparison.steps_compared, comparison.steps_total
    steps = _steps(compared) if compared == total else f"{compared} of {_steps(total)}"
    skipped = f"; {comparison.steps_skipped} of them skipped by both" if comparison.steps_skipped else ""
    return f": {steps}, loss, gradient norm and learning rate equal bit for bit{skipped}{_ending(comparison)}"


def _different(comparison: Comparison) -> str:
    first = comparison.first
    assert first is not None  # a verdict of different comes from a first difference
    values = " vs ".join(_shown(first, value) for value in (first.a, first.b))
    return (
        f" at step {first.step}: {first.field.label} ({first.field.phase}) {values}{_distance(first)}; "
        f"{comparison.steps_differing} of {_steps(comparison.steps_compared)} differ{_ending(comparison)}"
    )


def _not_comparable(comparison: Comparison) -> str:
    rows = [(d.field, d.a or _NOT_SET, d.b or _NOT_SET) for d in comparison.refused]
    if not rows:
        empty = " and ".join(str(run_name(run)) for run in (comparison.a, comparison.b) if not run.steps)
        return f": no common step, none recorded in {empty}"
    more = f" and {len(rows) - _FIELDS_IN_LINE} more" if len(rows) > _FIELDS_IN_LINE else ""
    return ": " + ", ".join(f"{name} is {a} and {b}" for name, a, b in rows[:_FIELDS_IN_LINE]) + more


_LINES = {
    Verdict.IDENTICAL: _identical,
    Verdict.DIFFERENT: _different,
    Verdict.NOT_COMPARABLE: _not_comparable,
}


def _ending(comparison: Comparison) -> str:
    if len(comparison.a.steps) == len(comparison.b.steps):
        return ""
    shorter = min(comparison.a, comparison.b, key=lambda ledger: len(ledger.steps))
    return f"; {run_name(shorter)} ends at step {len(shorter.steps)}"


def _shown(first: FirstDifference, value: Any) -> str:
    if value is None:
        return "none"
    return f"{value} {readable(value)}" if first.field.is_float else str(value).lower()


def _distance(first: FirstDifference) -> str:
    return "" if first.ulp is None else f", {first.ulp} ULP"
