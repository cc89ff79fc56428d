"""The end of a command that judges: its result, for people or for programs, and its exit status."""

from collections.abc import Callable
from typing import Any, NoReturn

import typer

from tp_invariant_recipes.machine import terminal


def end(result: Any, status: int, show: Callable[[], None], *, as_json: bool) -> NoReturn:
    """Print a result as JSON, or have it shown, and end with a status."""
    if as_json:
        terminal.print_json(result)
    else:
        show()
    raise typer.Exit(status)
