"""The callbacks that write manifests: of each finished checkpoint, and of the index of the data."""

from pathlib import Path
from typing import Any

from megatron.bridge.training.callbacks import Callback

from tp_invariant_recipes.runs import index_cache
from tp_invariant_recipes.runs.checkpoints import step_of, write_manifest
from tp_invariant_recipes.training import written_hashes


class ManifestWriter(Callback):
    """Writes the manifest of each checkpoint as it is finished. For every rank.

    Each has hashed the files that it has written; the first rank collects the hashes and writes.
    """

    def __init__(
        self, identity_hash: str, layout: dict[str, Any], optimizer_state: str, *, separate_experts: bool, first: bool
    ) -> None:
        self.identity_hash = identity_hash
        self.layout = layout
        self.optimizer_state = optimizer_state
        self.separate_experts = separate_experts
        self.first = first

    def on_checkpoint_save(self, context: Any) -> None:
        """Bridge calls this on every rank once all have written; with `checkpoint.async_save` some steps later."""
        path = written_hashes.finalized()
        known = written_hashes.of_all_ranks(path)
        if self.first:
            parts = self.identity_hash, self.layout, self.optimizer_state
            write_manifest(path, step_of(path), *parts, separate_experts=self.separate_experts, known=known)


class IndexRecorder(Callback):
    """Removes torn or changed files of the index, and records those that the run trains with.

    For the rank that builds the index: the others wait for it before they read a file. Raises RunError.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def on_data_init_start(self, context: Any) -> None:
        """Before Megatron looks for files."""
        for name in index_cache.remove_unrecorded(self.cache):
            print(f"{self.cache / name}: torn, changed, or not recorded: it is built again")

    def on_train_start(self, context: Any) -> None:
        """All files are there."""
        index_cache.record(self.cache)
