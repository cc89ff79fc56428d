"""`tpi compare`: did these runs compute the same bits?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tp_invariant_recipes.cli.arguments import argument, flag
from tp_invariant_recipes.cli.output import progress
from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.foreign_text import single_line
from tp_invariant_recipes.machine import terminal

if TYPE_CHECKING:
    from tp_invariant_recipes.compare.compare import Comparison

_COLOURS = {0: "green", 1: "red", 2: "yellow"}  # by exit status
_ROWS = 12  # of parameters, without --all


def compare(
    runs: Annotated[
        list[Path],
        argument("RUN_A RUN_B [RUN_C ...]", "Run directories, ledger files or certificates."),
    ],
    every: Annotated[bool, flag("Print every parameter that differs, not only the first 12.", "--all")] = False,
    as_json: Annotated[bool, flag("Print everything as one JSON object.", "--json")] = False,
) -> None:
    """Compare runs with the first one, bit for bit.

    Runs with the same model, data set and seed are comparable, whatever their layout. tpi compares everything that both
    ledgers hold of every common step: loss, gradient norm, learning rate, digests of gradients, master weights and
    optimizer moments, traces. It names the first difference in the order of execution. Exit status: 0 identical,
    1 different, 2 not comparable or unreadable.

    \b
    tpi compare runs/a runs/b
    tpi compare runs/a other-cluster.tpicert --json
    """
    from tp_invariant_recipes.compare.compare import UNREADABLE
    from tp_invariant_recipes.compare.comparison_json import error_report, exit_status, report

    try:
        comparisons = _compare_all(runs)
    except LedgerError as error:
        if as_json:
            terminal.print_json(error_report(error), indent=2)
        else:
            terminal.print_line(terminal.console(stderr=True), f"not comparable: {error}")
        raise typer.Exit(UNREADABLE) from None
    if as_json:
        terminal.print_json(report(comparisons), indent=2)
    else:
        _print(comparisons, every)
    raise typer.Exit(exit_status(comparisons))


def _compare_all(runs: list[Path]) -> "tuple[Comparison, ...]":
    from tp_invariant_recipes.compare.compare import compare_all
    from tp_invariant_recipes.ledger.open import streamed

    if len(runs) < 2:
        raise LedgerError("a comparison needs two runs: tpi compare RUN_A RUN_B")
    with progress.slow_progress(terminal.console(stderr=True)) as slow:
        first, *others = [streamed(run, progress=slow.reading(run)) for run in runs]
        return compare_all(first, others, progress=slow.counting("comparing: step"))


def _print(comparisons: "tuple[Comparison, ...]", every: bool) -> None:
    from tp_invariant_recipes.compare.text import header_rows, remarks, run_name, verdict_line

    console = terminal.console()
    printed = set()
    for comparison in comparisons:
        line = Text(single_line(verdict_line(comparison)))
        line.stylize(f"bold {_COLOURS[comparison.exit_status]}", 0, len(comparison.verdict.value))
        prefix = f"{single_line(run_name(comparison.b))}: " if len(comparisons) > 1 else ""
        terminal.print_line(console, Text(prefix) + line)
        _print_parameters(console, comparison, every)
        rows = header_rows(comparison)
        if rows:
            console.print(_table(comparison, rows))
        for sentence in remarks(comparison):
            if sentence not in printed:
                terminal.print_line(console, single_line(sentence), "dim")
            printed.add(sentence)


def _print_parameters(console: Console, comparison: "Comparison", every: bool) -> None:
    from tp_invariant_recipes.compare.text import parameter_line, parameter_rows, parameters_alike

    line = parameter_line(comparison)
    if line is None:
        return
    terminal.print_line(console, line)
    if parameters_alike(comparison) and not every:
        return
    rows = parameter_rows(comparison)
    shown = rows if every else rows[:_ROWS]
    # Not a table of rich: names are copied from here, so they are never folded.
    table = [("parameter", "gradient from", "moments from", "weight from", "steps")]
    for row in shown:
        gradient, moments, weight = ("" if n is None else str(n) for n in (row.gradient, row.moments, row.weight))
        table.append((single_line(row.name), gradient, moments, weight, str(row.steps)))
    width = max(len(name) for name, *_ in table)
    console.print()
    for name, gradient, moments, weight, steps in table:
        terminal.print_line(console, f"{name:{width}}  {gradient:>13}  {moments:>12}  {weight:>11}  {steps:>5}")
    console.print()
    if len(shown) < len(rows):
        console.print(f"and {len(rows) - len(shown)} more (--all)")


def _table(comparison: "Comparison", rows: tuple[tuple[str, str, str], ...]) -> Table:
    """Cells are Text, because a header may contain characters that rich reads as markup."""
    from tp_invariant_recipes.compare.text import run_name

    table = Table("header")
    for run in (comparison.a, comparison.b):
        table.add_column(Text(single_line(run_name(run))))
    for row in rows:
        table.add_row(*(Text(single_line(cell), overflow="fold") for cell in row))
    return table
