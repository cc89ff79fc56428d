"""`tpi compare`: did these runs compute the same bits?"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.ledger.compare import UNREADABLE, Comparison, Verdict
from tp_invariant_recipes.ledger.compare import compare as compare_ledgers
from tp_invariant_recipes.ledger.reader import read
from tp_invariant_recipes.ledger.report import (
    error_report,
    exit_status,
    header_rows,
    remarks,
    report,
    run_name,
    verdict_line,
)

_COLOURS = {Verdict.IDENTICAL: "green", Verdict.DIFFERENT: "red", Verdict.NOT_COMPARABLE: "yellow"}


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_A RUN_B [RUN_C ...]", help="Run directories, or ledger files.", show_default=False),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Compare the ledgers of runs with the first one, bit for bit.

    Runs of one model, data set and seed can be compared whatever their layout. Compared are loss, gradient norm and
    learning rate of every common step. Exit status: 0 identical, 1 different, 2 not comparable or unreadable.
    """
    try:
        comparisons = _compare_all(runs)
    except LedgerError as error:
        if as_json:
            typer.echo(json.dumps(error_report(error), indent=2))
        else:
            typer.echo(f"not comparable: {error}", err=True)
        raise typer.Exit(UNREADABLE) from None
    if as_json:
        typer.echo(json.dumps(report(comparisons), indent=2))
    else:
        _print(comparisons)
    raise typer.Exit(exit_status(comparisons))


def _compare_all(runs: list[Path]) -> tuple[Comparison, ...]:
    if len(runs) < 2:
        raise LedgerError("a comparison needs two runs: tpi compare RUN_A RUN_B")
    first, *others = [read(run) for run in runs]
    return tuple(compare_ledgers(first, other) for other in others)


def _print(comparisons: tuple[Comparison, ...]) -> None:
    console = Console(highlight=False)
    said = set()
    for comparison in comparisons:
        line = Text(verdict_line(comparison))
        line.stylize(f"bold {_COLOURS[comparison.verdict]}", 0, len(comparison.verdict.value))
        prefix = f"{run_name(comparison.b)}: " if len(comparisons) > 1 else ""
        console.print(Text(prefix) + line, soft_wrap=True)
        rows = header_rows(comparison)
        if rows:
            console.print(_table(comparison, rows))
        for sentence in remarks(comparison):
            if sentence not in said:
                console.print(Text(sentence, style="dim"), soft_wrap=True)
            said.add(sentence)


def _table(comparison: Comparison, rows: tuple[tuple[str, str, str], ...]) -> Table:
    """Cells are Text, because a header may hold what rich takes for markup."""
    table = Table("header")
    for run in (comparison.a, comparison.b):
        table.add_column(Text(str(run_name(run))))
    for row in rows:
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    return table
