# SPDX-License-Identifier: Apache-2.0
"""A patch: a row that names the installed code that it is for, and decides whether it applies on this machine."""

from __future__ import annotations

import ast
import hashlib
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.replacement import Replacement

if TYPE_CHECKING:
    from tp_invariant_recipes.settings.run_config import RunConfig


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


State = Literal["applies", "not needed", "refused", "off"]

COMPARISONS = {">=": operator.ge, "<": operator.lt}
PACKAGES = {"bridge": "megatron-bridge", "core": "megatron-core", "te": "transformer-engine"}


@dataclass(frozen=True)
class PatchVerdict:
    """The state of a patch on this machine, and the reason.

    state: "applies": the installed code is known to need it.
           "not needed": the package is absent, or its version does not need it.
           "refused": the version needs it, but the installed code differs from the code that the patch knows.
           "off": the user has switched it off.
    """

    state: State
    reason: str


@dataclass(frozen=True)
class Function:
    """A function that a patch replaces or reads, with its known fingerprints.

    file:  relative to the package's folder.
    name:  "name" or "Class.name".
    known: version -> fingerprint (`code.fingerprint`).
    """

    file: str
    name: str
    known: dict[str, str]


@dataclass(frozen=True)
class Patch:
    """One fix.

    name:     its name in `patches.off`, which begins with that of the distribution that it fixes (PACKAGES).
    versions: those that need it, such as ">=2.14,<2.16"; "" for all. With a form, the same condition in words.
    replaces: target -> what makes its replacement, in order of application.
    why:      the defect without it.
    form:     whether the installed code has the form that needs it, whatever its version; mostly a `Form`.
    functions: without a form: all must be known, so that it fits known code only. A missing function is unknown.
    upstream: address of the upstream fix or of its discussion; None: neither is known.
    reached:  whether a run reaches the code; None: every run does.
    loads:    whether the package can be imported, where that is not sure.
    """

    name: str
    versions: str
    replaces: Mapping[str, Callable[..., Any]]
    why: str
    form: Callable[[], bool] | None = None
    functions: tuple[Function, ...] = ()
    upstream: str | None = None
    reached: Callable[[RunConfig], Any] | None = None
    loads: Callable[[], bool] = lambda: True

    @property
    def package(self) -> str:
        """The distribution that it fixes."""
        return PACKAGES[self.name.partition("-")[0]]

    @property
    def replacements(self) -> tuple[Replacement, ...]:
        """The rows to apply."""
        return tuple(Replacement(target, make, self.why) for target, make in self.replaces.items())

    def concerns(self, config: RunConfig | None) -> bool:
        """Whether a run (None: an unknown one, which counts) reaches the code.

        If not, the patch is neither applied nor a reason to refuse the run.
        """
        reached = config is None or self.reached is None or self.reached(config)
        return bool(reached) and self.loads()

    def verdict(self, off: bool = False) -> PatchVerdict:
        """Decide by the files, and import nothing. off: the user has switched the patch off."""
        if off:
            return PatchVerdict("off", "by patches.off")
        version, where = installed(self.package), folder(self.package.replace("-", "_"))
        if version is None or not (self.form or where):
            return PatchVerdict("not needed", f"{self.package} is not installed")
        found = f"{self.package} {version}"
        if not (self.form() if self.form else within(version, self.versions)):
            return PatchVerdict("not needed", f"{found} does not need it; needed by {self.versions}")
        strange = [f for f in self.functions if where and fingerprint(where / f.file, f.name) not in f.known.values()]
        if strange:
            names = ", ".join(f.name for f in strange)
            return PatchVerdict("refused", f"{found} has an unknown {names} ({strange[0].file})")
        return PatchVerdict("applies", found)


def within(version: str, versions: str) -> bool:
    """Whether a version is in a range of ">=" and "<".

    A pre-release precedes its release, so a pre-release of the version with the fix counts as without the fix.
    packaging's own rule would exclude it.
    """
    return all(
        COMPARISONS[bound.operator](Version(version), Version(bound.version)) for bound in SpecifierSet(versions)
    )


if __name__ == "__main__":
    print(fingerprint(Path(sys.argv[1]), sys.argv[2]))
