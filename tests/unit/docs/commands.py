# SPDX-License-Identifier: Apache-2.0
"""The command line as typer has it: which commands and options there are, and how a line is parsed."""

import shlex
from typing import Any

import typer

from tp_invariant_recipes.cli.main import app

ROOT_COMMAND = typer.main.get_command(app)


def names(command: Any = ROOT_COMMAND, before: str = "") -> dict[str, Any]:
    """Command -> what runs it; of a group its members, as `data prepare`."""
    results = {}
    for name, inner in command.commands.items():
        results |= names(inner, f"{before}{name} ") if hasattr(inner, "commands") else {before + name: inner}
    return results


def options() -> set[str]:
    """Every option of every command."""
    parameters = [parameter for command in (ROOT_COMMAND, *names().values()) for parameter in command.params]
    results = {word for parameter in parameters for word in (*parameter.opts, *parameter.secondary_opts)}
    return {word for word in results if word.startswith("-")} | {"--help"}


def parsed(line: str) -> tuple[str, dict[str, Any]]:
    """The command of a line that begins with `tpi`, and its arguments. Raises typer's usage errors, or KeyError."""
    _, *words = shlex.split(line)
    command, name = ROOT_COMMAND, ""
    while hasattr(command, "commands") and not words[0].startswith("-"):
        name = f"{name} {words[0]}".strip()
        command = command.commands[words.pop(0)]
    if not name:  # an option of tpi alone: typer's completion would write into the home directory at once
        return name, dict.fromkeys(words)
    return name, command.make_context(f"tpi {name}", words).params
