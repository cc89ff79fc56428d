"""The Python files of the project, each parsed once in a worker of pytest."""

import ast
import gc
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = PROJECT / "tp_invariant_recipes"


@cache
def trees() -> dict[Path, ast.Module]:
    """A file, from the package on → its tree, which nobody changes.

    Collections would visit a million nodes again and again, which takes as long as parsing.
    """
    gc.disable()
    parsed = {file.relative_to(PACKAGE): ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}
    gc.freeze()
    gc.enable()
    return parsed


@cache
def other_trees() -> dict[Path, ast.Module]:
    """As `trees`, of tests, scripts and examples: a file, from the project on."""
    files = sorted(file for folder in ("tests", "scripts", "examples") for file in (PROJECT / folder).rglob("*"))
    return {file.relative_to(PROJECT): ast.parse(file.read_text()) for file in files if _is_python(file)}


def _is_python(file: Path) -> bool:
    """Whether a file has Python's suffix, or is a script that begins with Python's name."""
    if file.suffix == ".py" or file.suffix or not file.is_file():
        return file.suffix == ".py"
    with file.open("rb") as stream:
        line = stream.readline()
    return line.startswith(b"#!") and b"python" in line
