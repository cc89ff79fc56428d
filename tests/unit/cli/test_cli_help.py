"""Help on a terminal of 80 columns: no line is longer, no sentence is broken early, no example is broken at all."""

import inspect
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
import typer
from typer.testing import CliRunner

from tp_invariant_recipes.cli import data, main
from tp_invariant_recipes.cli.arguments import help_text

WIDTH = 80
FRAME = "╭╰│"


def commands_by_words() -> dict[str, typer.models.CommandInfo]:
    """Every command by the words that call it."""
    named = {info.name: info for info in main.app.registered_commands}
    named |= {f"data {info.name}": info for info in data.data_app.registered_commands}
    return {name: info for name, info in named.items() if name}


def rendered(app: typer.Typer, *words: str) -> list[str]:
    ended = CliRunner().invoke(app, [*words, "--help"])
    assert ended.exit_code == 0, ended.output
    return [line.rstrip() for line in ended.output.splitlines()]


def prose(lines: list[str]) -> Iterator[list[str]]:
    """Paragraphs outside the panels, without usage, each as its lines."""
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip() and line[0] not in FRAME and not line.startswith(" Usage:"):
            paragraph.append(line)
        elif paragraph:
            yield paragraph
            paragraph = []


def broken_early(paragraph: list[str]) -> list[str]:
    """Lines after which the next line's first word would have had room; one column stays free at the right."""
    return [line for line, following in pairwise(paragraph) if len(line) + 1 + len(following.split()[0]) < WIDTH]


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
    for paragraph in prose(lines):
        if not {line.strip() for line in paragraph} & set(kept):
            assert broken_early(paragraph) == []


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


def told() -> None:
    """A sentence that fills more than one line of a docstring, because it goes on for longer than a hundred columns and

    more.

    \b
    tpi told one
    tpi told two

    The last paragraph has two lines of source, the first of which ends before
    the sentence does.
    """


def test_paragraphs_are_joined_and_examples_are_not():
    paragraphs = help_text(told).split("\n\n")
    assert paragraphs[2] == "\btpi told one\ntpi told two"
    assert "before the sentence does." in paragraphs[3]
    assert not any("\n" in text for text in paragraphs if not text.startswith("\b"))


@pytest.mark.parametrize("text", (inspect.getdoc(told), help_text(told)), ids=("as typer takes it", "joined"))
def test_a_docstring_as_it_is_would_be_broken_early(text):
    """The control: without `help_text` the check above fails."""
    app = typer.Typer(rich_markup_mode="rich")
    app.command(help=text)(told)
    last = list(prose(rendered(app)))[-1]
    assert bool(broken_early(last)) == (text != help_text(told))
