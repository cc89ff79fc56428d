# SPDX-License-Identifier: Apache-2.0
"""What `tpi compare` found: every comparison with the first run, as lines and as JSON."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, override

from rich.table import Table
from rich.text import Text

from tp_invariant_recipes.comparison.compare import UNREADABLE, Comparison, FirstDifference
from tp_invariant_recipes.comparison.explanation import run_name
from tp_invariant_recipes.comparison.magnitude import magnitude_report
from tp_invariant_recipes.comparison.step_order import FIELDS, is_float
from tp_invariant_recipes.comparison.text import (
    header_rows,
    parameter_line,
    parameter_rows,
    parameters_alike,
    remarks,
    verdict_line,
)
from tp_invariant_recipes.ledger.bits import described
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.schema import HeaderDifference
from tp_invariant_recipes.result import Result
from tp_invariant_recipes.text import single_line

REPORT_SCHEMA = 2


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
        "steps_compared": comparison.tally.compared,
        "steps_differing": comparison.tally.differing,
        "steps_skipped": comparison.tally.skipped,
        "first_difference": _first(comparison) if comparison.first else None,
        "model": [
            {"parameter": difference.name, "a": difference.a, "b": difference.b} for difference in comparison.model
        ],
        "initial": [difference.name for difference in comparison.initial],
        "parameters": [
            {"name": parameter.name, "kind": parameter.kind, "steps": list(parameter.steps)}
            for parameter in comparison.tally.parameters
        ],
        "coverage": {name: asdict(coverage) for name, coverage in comparison.tally.coverage.items()},
        "unmatched": [
            {"name": tensor.name, "step": tensor.step, "run": run_name(tensor.run)} for tensor in comparison.unmatched
        ],
        "trace": asdict(comparison.tally.trace),
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


_COLOURS = {0: "green", 1: "red", 2: "yellow"}  # by exit status
_ROWS = 12  # of parameters, unless all are asked for


@dataclass(frozen=True)
class CompareResult(Result):
    """Comparisons of other runs with one first run. every: whether `lines` has every parameter that differs."""

    comparisons: tuple[Comparison, ...]
    every: bool = False
    indent = 2

    @property
    @override
    def exit_status(self) -> int:
        """Return the worst of several: one incomparable run outweighs a different one."""
        return max(comparison.exit_status for comparison in self.comparisons)

    @property
    def identical(self) -> bool:
        """Whether all runs have the bits of the first one."""
        return self.exit_status == 0

    @property
    def first_difference(self) -> FirstDifference | None:
        """The first difference of the first comparison that has one; None: there is none."""
        return next((comparison.first for comparison in self.comparisons if comparison.first), None)

    @property
    def text(self) -> str:
        """The verdicts, a line for each comparison."""
        return "\n".join(verdict_line(comparison) for comparison in self.comparisons)

    @override
    def as_json(self) -> dict[str, Any]:
        return {
            "schema": REPORT_SCHEMA,
            "exit_status": self.exit_status,
            "error": None,
            "compared_fields": [field.name for field in FIELDS],
            "comparisons": [comparison_json(comparison) for comparison in self.comparisons],
        }

    @override
    def lines(self) -> Iterator[str | Text | Table]:
        printed = set()
        for comparison in self.comparisons:
            line = Text(single_line(verdict_line(comparison)))
            line.stylize(f"bold {_COLOURS[comparison.exit_status]}", 0, len(comparison.verdict.value))
            prefix = f"{single_line(run_name(comparison.b))}: " if len(self.comparisons) > 1 else ""
            yield Text(prefix) + line
            yield from self._parameters(comparison)
            if rows := header_rows(comparison):
                yield _header(comparison, rows)
            for sentence in remarks(comparison):
                if sentence not in printed:
                    yield Text(single_line(sentence), style="dim")
                printed.add(sentence)

    def _parameters(self, comparison: Comparison) -> Iterator[str]:
        """Not a table of rich: names are copied from here, so they are never folded."""
        line = parameter_line(comparison)
        if line is None:
            return
        yield line
        if parameters_alike(comparison) and not self.every:
            return
        rows = parameter_rows(comparison)
        shown = rows if self.every else rows[:_ROWS]
        table = [("parameter", "gradient from", "moments from", "weight from", "steps")]
        for row in shown:
            gradient, moments, weight = ("" if n is None else str(n) for n in (row.gradient, row.moments, row.weight))
            table.append((single_line(row.name), gradient, moments, weight, str(row.steps)))
        width = max(len(name) for name, *_ in table)
        yield ""
        for name, gradient, moments, weight, steps in table:
            yield f"{name:{width}}  {gradient:>13}  {moments:>12}  {weight:>11}  {steps:>5}"
        yield ""
        if len(shown) < len(rows):
            yield f"and {len(rows) - len(shown)} more (--all)"


def _header(comparison: Comparison, rows: tuple[tuple[str, str, str], ...]) -> Table:
    """Cells are Text, because a header may contain characters that rich reads as markup."""
    table = Table("header")
    for run in (comparison.a, comparison.b):
        table.add_column(Text(single_line(run_name(run))))
    for row in rows:
        table.add_row(*(Text(single_line(cell), overflow="fold") for cell in row))
    return table
