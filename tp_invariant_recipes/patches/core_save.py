"""Megatron-Core starts a manager process for every checkpoint save, even when this process writes the files."""

import queue
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

from tp_invariant_recipes.patches import code
from tp_invariant_recipes.patches.patch import Looks, Patch
from tp_invariant_recipes.start import parent

WHY = (
    "every save, even one within this process, starts a manager process; that takes seconds, "
    "and a killed rank leaves it behind with 0.3 GB"
)


def queue_in_this_process(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a queue for a save within this process, or Megatron's shared one, whose manager ends with this process."""

    def get_write_results_queue(mp_mode: str | None = None) -> Any:
        from multiprocessing.managers import SyncManager

        from megatron.core.dist_checkpointing.strategies import filesystem_async

        if mp_mode is None and filesystem_async._results_queue is None:
            return queue.Queue()
        if filesystem_async._results_queue is None:
            manager = SyncManager(ctx=get_context(mp_mode))
            manager.start(parent.serve_starter)
            filesystem_async._results_queue = manager.Queue()
        return filesystem_async._results_queue

    return get_write_results_queue


def manager_for_every_save() -> bool:
    """Whether the installed function starts a manager process."""
    file = "dist_checkpointing/strategies/filesystem_async.py"
    return "Manager()" in code.source("megatron.core", file, "get_write_results_queue")


PATCH = Patch(
    name="core-save-without-manager",
    package="megatron-core",
    need=Looks(manager_for_every_save, "get_write_results_queue() that makes a Manager()"),
    replaces={
        "megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue": queue_in_this_process
    },
    why=WHY,
)
