"""Inspect installed code without importing it: the folder of a package, the fingerprint of a function.

    python -m tp_invariant_recipes.patches.code FILE FUNCTION

prints the fingerprint to add to a row of the table.
"""

import ast
import hashlib
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def folder(package: str) -> Path | None:
    """Return the folder of an installed package, such as "megatron.core"; None: it is absent, or a placeholder stands
    for it.

    Imports at most the parents of `package`.
    """
    try:
        spec = find_spec(package)
    except (ModuleNotFoundError, ValueError):  # no parent package; a loaded module without a spec
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def source(package: str, file: str, function: str) -> str:
    """Get the text of a function at the top of a file of an installed package; "" where one of the three is absent."""
    top = folder(package)
    place = top / file if top else None
    text = place.read_text(encoding="utf-8") if place and place.is_file() else ""
    return text.partition(f"def {function}")[2].partition("\ndef ")[0]


@dataclass(frozen=True)
class Form:
    """A form of an installed function: its text has one text and lacks another one; "": any.

    file, function, package: as of `source`.
    """

    file: str
    function: str
    has: str = ""
    lacks: str = ""
    package: str = "megatron.core"

    def __call__(self) -> bool:
        """Whether the function is there and has this form."""
        text = source(self.package, self.file, self.function)
        return bool(text) and self.has in text and not (self.lacks and self.lacks in text)


def fingerprint(file: Path, function: str) -> str | None:
    """16 hex digits of a function's syntax tree, without comments, layout and docstring.

    function: "name" or "Class.name".
    returns:  None when the file has no such function, or this Python cannot parse the file.
    Syntax trees differ between versions of Python; this package supports one version.
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
    functions: list[tuple[str, ast.FunctionDef]] = []
    for node in parent.body:
        if isinstance(node, ast.FunctionDef):
            functions.append((prefix + node.name, node))
        elif isinstance(node, ast.ClassDef):
            functions += _functions(node, f"{prefix}{node.name}.")
    return functions


def _text(function: ast.FunctionDef) -> str:
    if ast.get_docstring(function, clean=False) is not None:
        function.body = function.body[1:]
    return ast.dump(function)


if __name__ == "__main__":
    print(fingerprint(Path(sys.argv[1]), sys.argv[2]))
