# SPDX-License-Identifier: Apache-2.0
"""How commands print: lists of thousands of runs or jobs, and the end of a command."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn

import typer
from rich.text import Text

from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.result import Result
from tp_invariant_recipes.text import single_line


@dataclass(frozen=True)
class Line:
    """A row. colour: of its cell `coloured`. why: behind the cells; "" for nothing."""

    cells: tuple[str, ...]
    colour: str
    why: str


def show(head: Sequence[str], lines: Sequence[Line], *, numeric: Collection[str], coloured: str) -> None:
    """Print them below their head. numeric: columns of numbers, flush right. coloured: the column that has a colour.

    It is no table of rich: paths are never folded, and rich takes seconds for thousands of rows.
    """
    rows = [tuple(map(single_line, line.cells)) for line in lines]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    form = "  ".join(f"{{:{'>' if name in numeric else '<'}{width}}}" for name, width in zip(head, widths, strict=True))
    at = head.index(coloured)
    start = sum(widths[:at]) + 2 * at
    text = Text(no_wrap=True).append(f"{form.format(*head).rstrip()}\n", style="bold")
    for line, row in zip(lines, rows, strict=True):
        whole, end = form.format(*row).rstrip(), start + len(row[at])
        text.append(whole[:start]).append(whole[start:end], style=line.colour).append(whole[end:])
        text.append(f"  {single_line(line.why)}\n" if line.why else "\n", style="dim")
    terminal.console(soft_wrap=True).print(text, end="")


def finish(result: Result, *, as_json: bool) -> NoReturn:
    """Print a result and end with its status. Every result derives from `tp_invariant_recipes.result.Result`."""
    if as_json:
        terminal.print_text(result.to_json())
    else:
        terminal.print_all(terminal.console(), result.lines())
    raise typer.Exit(result.exit_status)
