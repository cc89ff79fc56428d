"""The callback that checks and records the index of a run's data."""

from pathlib import Path
from typing import Any

from megatron.bridge.training.callbacks import Callback

from tp_invariant_recipes.runs import index_cache


class IndexRecorder(Callback):
    """Removes files of the index that are torn or changed, and records those that the run trains with.

    For the rank that builds the index: the others wait for it before they read a file.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def on_data_init_start(self, context: Any) -> None:
        """Before Megatron looks for files. Raises RunError."""
        for name in index_cache.remove_unrecorded(self.cache):
            print(f"{self.cache / name}: torn, changed, or not recorded: it is built again")

    def on_train_start(self, context: Any) -> None:
        """All files are there. Raises RunError."""
        index_cache.record(self.cache)
