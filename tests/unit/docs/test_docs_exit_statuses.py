"""Exit statuses: 1 means different and nothing else, and each documented table is the code's."""

import ast
import re
from collections.abc import Iterable

from tests.source_trees import nodes
from tests.unit.docs.markdown import DOCUMENTS
from tp_invariant_recipes.cli.main import app
from tp_invariant_recipes.comparison import compare
from tp_invariant_recipes.features.verify import verdict

# Verdict -> exit status, of all that give a verdict. The last two are of `tpi audit`.
STATUSES = {
    **{item.value: status for item, status in compare.EXIT_STATUS.items()},
    **verdict.EXIT_STATUS,
    "within rounding": 0,
    "beyond rounding": 1,
}
MEANING = {0: "done or identical", 1: "different", 2: "a mistake", 130: "Ctrl-C"}


def documented_statuses() -> list[tuple[str, int, str]]:
    """Document, status and the verdict beside it, of every table of exit statuses."""
    return [
        (document.name, int(status), row[at + 1].strip("`"))
        for document in DOCUMENTS
        for header, rows in document.tables
        if "exit status" in header
        for at in [header.index("exit status")]
        for row in rows
        for status in row[at].split(", ")
    ]


def test_a_documented_status_is_the_codes():
    rows = documented_statuses()
    assert {name for name, _, _ in rows} == {"docs/exit-statuses.md"}  # the other pages link to it
    assert {*STATUSES} <= {verdict for _, _, verdict in rows}
    for name, status, meaning in rows:
        assert status in MEANING, name
        known = [verdict for verdict in STATUSES if re.match(rf"{verdict}\b", meaning)]
        assert [STATUSES[verdict] for verdict in known] in ([], [status]), (name, meaning)


def test_the_help_names_every_status():
    assert [status for status in MEANING if not re.search(rf"\b{status} {MEANING[status]}", app.info.epilog)] == []


def ends(nodes: Iterable[ast.AST]) -> set[int]:
    """The numbers that code ends with where it does not take them from a table."""
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    exits = [call for call in calls if re.search(r"(?:\.|^)(?:Exit|exit|_exit|SystemExit)$", ast.unparse(call.func))]
    return {
        arg.value for call in exits for arg in call.args if isinstance(arg, ast.Constant) and type(arg.value) is int
    }


def test_a_command_never_ends_with_1_by_itself():
    commands = {file: inner for file, inner in nodes().items() if file.parts[0] == "cli"}
    assert commands
    assert {file for file, inner in commands.items() if not ends(inner) <= {0, 2, 130}} == set()
    planted = "import typer\nraise typer.Exit(1)\nsys.exit(2)\nraise SystemExit(130)\n"
    assert ends(ast.walk(ast.parse(planted))) == {1, 2, 130}
