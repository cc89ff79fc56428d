"""Whether a recipe's file or module defines its function, read from the source: nothing of it is imported.

What the source cannot tell, such as a star import, is left to the import.
"""

import ast
import importlib.util
import pkgutil
import warnings
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path

from tp_invariant_recipes.settings.nearest import nearest

# Names by which code can define others of its module, or say itself what the module has.
_DYNAMIC = {"globals", "exec", "eval", "__getattr__", "modules", "import_module", "__import__"}
_WITHOUT_ARGUMENTS = {"vars", "locals"}  # with one they are of an object
_DEFINES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Unknown(Exception):
    """The source does not tell."""


def module_file(name: str) -> Path:
    """Return the source of a module, which is not imported.

    Raises ModuleNotFoundError, with the nearest name: Python finds no such module; Unknown.
    """
    parts = name.split(".")
    spec, around, package = _top(parts[0]), None, ""
    for part in parts:
        if package:
            around = _folders(spec)
            spec = PathFinder.find_spec(package + part, around)
        if spec is None:
            known = [package + module.name for module in pkgutil.iter_modules(around)]
            raise ModuleNotFoundError(
                f"there is no module {package}{part} that Python finds (PYTHONPATH){nearest(package + part, known)}"
            )
        package += f"{part}."
    if spec is None or not isinstance(spec.loader, SourceFileLoader) or spec.origin is None:
        raise Unknown
    return Path(spec.origin)


def _top(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ValueError as error:  # a module that is being run has none
        raise Unknown from error


def _folders(package: ModuleSpec | None) -> list[str]:
    """Where a package's modules lie. Raises Unknown: it is no package, or may find its modules itself."""
    if package is None or package.submodule_search_locations is None:
        raise Unknown
    code = Path(package.origin).read_bytes() if package.has_location and package.origin else b""
    if any(word in code for word in (b"__path__", b"sys.modules", b"meta_path")):
        raise Unknown
    return list(package.submodule_search_locations)


def functions(source: bytes, file: Path) -> tuple[set[str], list[str]]:
    """Every name that a module's source gives a value, and the public functions among them, to suggest.

    Raises SyntaxError, ValueError: Python cannot read it; Unknown: it may have other names.
    """
    with warnings.catch_warnings(action="ignore"):
        tree = ast.parse(source, str(file))
        compile(tree, str(file), "exec", dont_inherit=True)
    if any(map(_is_dynamic, ast.walk(tree))):
        raise Unknown
    names = {name for node in ast.walk(tree) for name in _given(node)}
    return names, [node.name for node in tree.body if isinstance(node, _DEFINES) and node.name[0] != "_"]


def _is_dynamic(node: ast.AST) -> bool:
    if isinstance(node, ast.alias):
        return node.name in {"*", *_DYNAMIC}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _WITHOUT_ARGUMENTS:
        return not node.args
    return any(getattr(node, field, None) in _DYNAMIC for field in ("id", "attr", "name"))


def _given(node: ast.AST) -> Iterable[str]:
    """Return the names that a node of a source gives a value, those of functions included."""
    if isinstance(node, ast.alias):
        return [node.asname or node.name.partition(".")[0]]
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, ast.MatchMapping):
        return [node.rest] if node.rest else []
    if isinstance(node, _DEFINES | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return [node.name] if node.name else []
    return []
