"""Comparisons as one JSON object (docs/ledger.md)."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from tp_invariant_recipes.compare.compare import UNREADABLE, Comparison, FirstDifference
from tp_invariant_recipes.compare.explanation import run_name
from tp_invariant_recipes.compare.magnitude import magnitude_report
from tp_invariant_recipes.compare.step_order import FIELDS, is_float
from tp_invariant_recipes.compare.text import remarks, verdict_line
from tp_invariant_recipes.ledger.bits import described
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.schema import HeaderDifference

REPORT_SCHEMA = 2


def exit_status(comparisons: Iterable[Comparison]) -> int:
    """Return the worst of several: one incomparable run outweighs a different one."""
    return max(comparison.exit_status for comparison in comparisons)


def report(comparisons: Sequence[Comparison]) -> dict:
    """All comparisons with one first run, as JSON. Documented in docs/ledger.md."""
    return {
        "schema": REPORT_SCHEMA,
        "exit_status": exit_status(comparisons),
        "error": None,
        "compared_fields": [field.name for field in FIELDS],
        "comparisons": [comparison_json(comparison) for comparison in comparisons],
    }


def error_report(error: Exception) -> dict:
    """Return the report of an unreadable ledger."""
    start = {"schema": REPORT_SCHEMA, "exit_status": UNREADABLE, "error": str(error)}
    return start | {"compared_fields": [], "comparisons": []}


def comparison_json(comparison: Comparison) -> dict:
    """One comparison as JSON."""
    return {
        "kind": "bits",
        "a": _ledger(comparison.a),
        "b": _ledger(comparison.b),
        "verdict": comparison.verdict.value,
        "text": verdict_line(comparison),
        "remarks": list(remarks(comparison)),
        "steps_compared": comparison.steps_compared,
        "steps_differing": comparison.steps_differing,
        "steps_skipped": comparison.steps_skipped,
        "first_difference": _first(comparison) if comparison.first else None,
        "model": [
            {"parameter": difference.name, "a": difference.a, "b": difference.b} for difference in comparison.model
        ],
        "initial": [difference.name for difference in comparison.initial],
        "parameters": [
            {"name": parameter.name, "kind": parameter.kind, "steps": list(parameter.steps)}
            for parameter in comparison.parameters
        ],
        "coverage": {name: asdict(coverage) for name, coverage in comparison.coverage.items()},
        "unmatched": [
            {"name": tensor.name, "step": tensor.step, "run": run_name(tensor.run)} for tensor in comparison.unmatched
        ],
        "trace": asdict(comparison.trace),
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


def _first(comparison: Comparison) -> dict:
    first = comparison.first
    assert first is not None  # the caller checks
    values = {"a": _value(first, first.a), "b": _value(first, first.b)}
    return asdict(first) | values | {"distance": magnitude_report(comparison)}


def _value(first: FirstDifference, value: Any) -> Any:
    return described(value) if is_float(first.kind, first.name) else value


def _difference(difference: HeaderDifference) -> dict:
    """Return a difference as JSON. A side without the field has no key, since null is a value."""
    sides = {"a": difference.a, "b": difference.b}
    return {"field": difference.field} | {side: json.loads(text) for side, text in sides.items() if text is not None}
