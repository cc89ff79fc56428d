"""The modules of the package, each parsed once in a worker of pytest."""

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "tp_invariant_recipes"


@cache
def trees() -> dict[Path, ast.Module]:
    """A file, from the package on → its tree, which nobody changes."""
    return {file.relative_to(PACKAGE): ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}
