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
