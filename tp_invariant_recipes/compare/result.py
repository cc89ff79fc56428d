"""What `tpi compare` found: every comparison with the first run, as lines and as JSON."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, override

from rich.table import Table
from rich.text import Text

from tp_invariant_recipes.compare.compare import Comparison
from tp_invariant_recipes.compare.comparison_json import exit_status, report
from tp_invariant_recipes.compare.explanation import run_name
from tp_invariant_recipes.compare.text import (
    header_rows,
    parameter_line,
    parameter_rows,
    parameters_alike,
    remarks,
    verdict_line,
)
from tp_invariant_recipes.foreign_text import single_line
from tp_invariant_recipes.result import Result

_COLOURS = {0: "green", 1: "red", 2: "yellow"}  # by exit status
_ROWS = 12  # of parameters, unless all are asked for


@dataclass(frozen=True)
class CompareResult(Result):
    """Comparisons of other runs with one first run. every: whether `lines` has every parameter that differs."""

    comparisons: tuple[Comparison, ...]
    every: bool = False

    @property
    @override
    def exit_status(self) -> int:
        return exit_status(self.comparisons)

    @override
    def as_json(self) -> dict[str, Any]:
        return report(self.comparisons)

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
