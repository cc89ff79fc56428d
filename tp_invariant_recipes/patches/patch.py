"""A patch: a row that names the installed code that it is for, and decides whether it applies on this machine."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.patches import code
from tp_invariant_recipes.replacement import Replacement

if TYPE_CHECKING:
    from tp_invariant_recipes.settings.run_config import RunConfig

State = Literal["applies", "not needed", "refused", "off"]

COMPARISONS = {">=": operator.ge, "<": operator.lt}


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
class Versions:
    """The need of a patch that a range of versions requires and that fits known code only.

    module:    the module that contains the code, such as "transformer_engine".
    versions:  ">=2.14,<2.16"; "" for all.
    functions: all must be known. A missing function is unknown.
    """

    module: str
    versions: str
    functions: tuple[Function, ...]

    def verdict(self, package: str) -> PatchVerdict:
        """Decide by the files; import nothing."""
        version, folder = installed(package), code.folder(self.module)
        if version is None or folder is None:
            return PatchVerdict("not needed", f"{package} is not installed")
        if not within(version, self.versions):
            return PatchVerdict("not needed", f"{package} {version} does not need it; needed by {self.versions}")
        strange = [f for f in self.functions if code.fingerprint(folder / f.file, f.name) not in f.known.values()]
        if strange:
            names = ", ".join(f.name for f in strange)
            return PatchVerdict("refused", f"{package} {version} has an unknown {names} ({strange[0].file})")
        return PatchVerdict("applies", f"{package} {version}")


@dataclass(frozen=True)
class Looks:
    """The need of a patch that code of a certain form requires, whatever its version.

    needed:   inspects the files and decides; mostly a `code.Form`.
    versions: the same condition in words.
    """

    needed: Callable[[], bool]
    versions: str

    def verdict(self, package: str) -> PatchVerdict:
        """Decide by the files; import nothing."""
        version = installed(package)
        if version is None:
            return PatchVerdict("not needed", f"{package} is not installed")
        if self.needed():
            return PatchVerdict("applies", f"{package} {version}")
        return PatchVerdict("not needed", f"{package} {version} does not need it; needed by {self.versions}")


@dataclass(frozen=True)
class Patch:
    """One fix.

    name:     its name in `patches.off`.
    package:  the distribution that it fixes.
    need:     the installed code that needs it.
    replaces: target -> what makes its replacement, in order of application.
    why:      the defect without it.
    upstream: address of the upstream fix or of its discussion; None: neither is known.
    reached:  whether a run reaches the code; None: every run does.
    loads:    whether the package can be imported, where that is not sure.
    """

    name: str
    package: str
    need: Versions | Looks
    replaces: Mapping[str, Callable[..., Any]]
    why: str
    upstream: str | None = None
    reached: Callable[[RunConfig], Any] | None = None
    loads: Callable[[], bool] = lambda: True

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
        """Return the patch's verdict on this machine. off: the user has switched the patch off."""
        return PatchVerdict("off", "by patches.off") if off else self.need.verdict(self.package)


def within(version: str, versions: str) -> bool:
    """Whether a version is in a range of ">=" and "<".

    A pre-release precedes its release, so a pre-release of the version with the fix counts as without the fix.
    packaging's own rule would exclude it.
    """
    return all(
        COMPARISONS[bound.operator](Version(version), Version(bound.version)) for bound in SpecifierSet(versions)
    )
