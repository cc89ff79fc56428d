"""The end of a command: its result, for people or for programs, and its exit status."""

from typing import NoReturn

import typer

from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.result import Result


def finish(result: Result, *, as_json: bool, indent: int | None = None) -> NoReturn:
    """Print a result and end with its status. Every result derives from `tp_invariant_recipes.result.Result`."""
    if as_json:
        terminal.print_json(result.as_json(), indent)
    else:
        terminal.print_all(terminal.console(), result.lines())
    raise typer.Exit(result.exit_status)
