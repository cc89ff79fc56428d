"""The patches, one row each: what, which code needs it, why. Those that are needed here are applied for a block."""

import queue
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


def _core(part: str) -> Path:
    """A file or folder of Megatron-Core. Found, not imported: `tpi doctor` asks too, and should not wait for torch."""
    spec = find_spec("megatron.core")
    folders = spec.submodule_search_locations if spec else None
    return Path(folders[0] if folders else "/nonexistent", part)


def _helpers_without_makefile() -> bool:
    folder = _core("datasets")
    return not (folder / "Makefile").exists() and any(folder.glob("helpers_cpp*.so"))


def _nothing(original: Any) -> Callable[[], None]:
    return lambda: None


def _queue_in_this_process(original: Any) -> Callable[..., Any]:
    """For a save that writes in this process; asynchronous saves have made Megatron's shared queue before."""

    def get_write_results_queue(mp_mode: str | None = None) -> Any:
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        if mp_mode is None and filesystem_async._results_queue is None:
            return queue.Queue()
        return original(mp_mode or "spawn")

    return get_write_results_queue


def _manager_for_every_save() -> bool:
    file = _core("dist_checkpointing/strategies/filesystem_async.py")
    source = file.read_text(encoding="utf-8") if file.is_file() else ""
    return "Manager()" in source.partition("def get_write_results_queue")[2].partition("\ndef ")[0]


PATCHES = (
    Patch(
        name="core-save-without-manager",
        replacement=Replacement(
            target="megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
            make=_queue_in_this_process,
            why="a save, even in this process, starts a manager process that outlives a killed rank "
            "with 0.3 GB, and takes seconds to start",
        ),
        needed=_manager_for_every_save,
    ),
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
