"""Installed code, looked at without importing it: where a package lies, what one of its functions is.

    python -m tp_invariant_recipes.patches.code FILE FUNCTION

prints the fingerprint that a row of the table would have to know.
"""

import ast
import hashlib
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def folder(package: str) -> Path | None:
    """Where an installed package lies, such as "megatron.core"; None without it, and for a placeholder in its place.

    Imports at most the parents of `package`.
    """
    try:
        spec = find_spec(package)
    except (ModuleNotFoundError, ValueError):  # no parent; a module that says nothing of where it comes from
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def fingerprint(file: Path, function: str) -> str | None:
    """16 hex digits that say what a function does: of its syntax tree, without comments, layout and docstring.

    function: "name" or "Class.name".
    returns:  None when the file has no such function, or none that this Python can read.
    Syntax trees differ between versions of Python; this package runs on one.
    """
    return _fingerprints(file, file.stat().st_mtime_ns).get(function) if file.is_file() else None


@cache
def _fingerprints(file: Path, changed: int) -> dict[str, str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return {}
    return {name: hashlib.sha256(_text(node).encode()).hexdigest()[:16] for name, node in _functions(tree, "")}


def _functions(parent: ast.Module | ast.ClassDef, prefix: str) -> list[tuple[str, ast.FunctionDef]]:
    found: list[tuple[str, ast.FunctionDef]] = []
    for node in parent.body:
        if isinstance(node, ast.FunctionDef):
            found.append((prefix + node.name, node))
        elif isinstance(node, ast.ClassDef):
            found += _functions(node, f"{prefix}{node.name}.")
    return found


def _text(function: ast.FunctionDef) -> str:
    if ast.get_docstring(function, clean=False) is not None:
        function.body = function.body[1:]
    return ast.dump(function)


if __name__ == "__main__":
    print(fingerprint(Path(sys.argv[1]), sys.argv[2]))
