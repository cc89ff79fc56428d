"""The patches, one row each: what, which code needs it, why. Those that are needed here are applied for a block."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tp_invariant_recipes import replacement
from tp_invariant_recipes.replacement import Replacement


@dataclass(frozen=True)
class Patch:
    """One fix.

    needed: whether the installed code needs it, decided by looking at that code.
    """

    name: str
    replacement: Replacement
    needed: Callable[[], bool]


def _helpers_without_makefile() -> bool:
    # Found, not imported: `tpi doctor` asks too, and should not wait for torch.
    spec = find_spec("megatron.core")
    if spec is None or not spec.submodule_search_locations:
        return False
    folder = Path(spec.submodule_search_locations[0]) / "datasets"
    return not (folder / "Makefile").exists() and any(folder.glob("helpers_cpp*.so"))


def _nothing(original: Any) -> Callable[[], None]:
    return lambda: None


PATCHES = (
    Patch(
        name="bridge-compile-helpers",
        replacement=Replacement(
            target="megatron.bridge.training.initialize:compile_helpers",
            make=_nothing,
            why="runs make in a folder where the megatron-core wheel has no Makefile, and exits; "
            "the wheel carries the compiled helpers",
        ),
        needed=_helpers_without_makefile,
    ),
)


@contextmanager
def applied() -> Iterator[list[str]]:
    """Apply the patches that the installed packages need; yields their names."""
    needed = [p for p in PATCHES if p.needed()]
    with replacement.applied(p.replacement for p in needed):
        yield [p.name for p in needed]
