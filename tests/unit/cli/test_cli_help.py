# SPDX-License-Identifier: Apache-2.0
"""Help on a terminal of 80 columns: no line is longer, and no example is broken."""

import inspect
import re

import pytest
import typer
from typer.testing import CliRunner

from tp_invariant_recipes.cli import main, train

WIDTH = 80


def commands_by_words() -> dict[str, typer.models.CommandInfo]:
    """Every command by the words that call it."""
    named = {info.name: info for info in main.app.registered_commands}
    named |= {f"data {info.name}": info for info in train.data_app.registered_commands}
    return {name: info for name, info in named.items() if name}


def rendered(app: typer.Typer, *words: str) -> list[str]:
    ended = CliRunner().invoke(app, [*words, "--help"])
    assert ended.exit_code == 0, ended.output
    return [line.rstrip() for line in ended.output.splitlines()]


def examples(docstring: str | None) -> list[str]:
    """The lines of paragraphs marked with \\b."""
    blocks = (text for text in inspect.cleandoc(docstring or "").split("\n\n") if text.startswith("\b\n"))
    return [line for block in blocks for line in block.splitlines()[1:]]


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("TERM", "dumb")


def check_lines(lines: list[str], kept: list[str]) -> None:
    assert [line for line in lines if len(line) > WIDTH] == []
    assert [example for example in kept if f" {example}" not in lines] == []


def test_all_commands_are_looked_at():
    assert {"train", "verify", "wait", "data prepare"} <= commands_by_words().keys()
    assert sum(bool(examples(info.callback.__doc__)) for info in commands_by_words().values()) >= 12


@pytest.mark.parametrize("name", [pytest.param(name, id=name.replace(" ", "-")) for name in commands_by_words()])
def test_help_survives_80_columns(name):
    check_lines(rendered(main.app, *name.split()), examples(commands_by_words()[name].callback.__doc__))


@pytest.mark.parametrize("words", ((), ("data",)), ids=("tpi", "data"))
def test_the_lists_of_commands_survive_80_columns(words):
    check_lines(rendered(main.app, *words), [])


def test_a_command_has_one_line_in_the_list():
    """A second line in the list of commands would be indented as far as the first one's text."""
    lines = rendered(main.app)
    listed = lines[next(number for number, line in enumerate(lines) if "─ Commands ─" in line) + 1 :]
    listed = [line.strip("│ ") for line in listed if line.startswith("│")]
    assert {line.split()[0] for line in listed} == {name.split()[0] for name in commands_by_words()}
    assert all(re.match(r"[a-z]+  +\S.*\.$", line) for line in listed), listed
