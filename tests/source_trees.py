# SPDX-License-Identifier: Apache-2.0
"""The Python files of the project, each parsed once in a worker of pytest."""

import ast
import gc
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = PROJECT / "tp_invariant_recipes"


@cache
def trees() -> dict[Path, ast.Module]:
    """A file, from the package on → its tree, which nobody changes."""
    return _parsed(PACKAGE, PACKAGE.rglob("*.py"))


@cache
def nodes() -> dict[Path, list[ast.AST]]:
    """A file of the package → all nodes of its tree in the order of ast.walk, which would take a second each time."""
    return {file: [*ast.walk(tree)] for file, tree in trees().items()}


def python_files(*folders: str) -> Iterator[Path]:
    """Python's files in these folders of the project, scripts included."""
    return filter(_is_python, (file for folder in folders for file in (PROJECT / folder).rglob("*")))


def _parsed(root: Path, files: Iterable[Path]) -> dict[Path, ast.Module]:
    """Collections would visit a million nodes again and again, which takes as long as parsing."""
    gc.disable()
    parsed = {file.relative_to(root): ast.parse(file.read_text()) for file in sorted(files)}
    gc.freeze()
    gc.enable()
    return parsed


def _is_python(file: Path) -> bool:
    """Whether a file has Python's suffix, or is a script that begins with Python's name."""
    if file.suffix == ".py" or file.suffix or not file.is_file():
        return file.suffix == ".py"
    with file.open("rb") as stream:
        line = stream.readline()
    return line.startswith(b"#!") and b"python" in line
