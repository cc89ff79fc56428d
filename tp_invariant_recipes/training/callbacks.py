# SPDX-License-Identifier: Apache-2.0
"""The callbacks of every training: manifests of checkpoints and of the data's index, and checks of a captured step."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.bridge.training.callbacks import Callback, CallbackContext

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.runs import run_dir
from tp_invariant_recipes.runs.checkpoints import step_of, write_manifest
from tp_invariant_recipes.start.bridge import deterministic_mode_without_its_extras
from tp_invariant_recipes.training import written_hashes


@dataclass(eq=False)
class ManifestWriter(Callback):
    """Writes the manifest of each checkpoint as it is finished. For every rank.

    Each has hashed the files that it has written; the first rank collects the hashes and writes.
    """

    identity_hash: str
    layout: dict[str, Any]
    optimizer_state: str
    separate_experts: bool = field(kw_only=True)
    first: bool = field(kw_only=True)

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
        for name in run_dir.remove_unrecorded(self.cache):
            print(f"{self.cache / name}: torn, changed, or not recorded: it is built again")

    def on_train_start(self, context: Any) -> None:
        """All files are there."""
        run_dir.record(self.cache)


class Finite(Callback):
    """After the recorder, so that the ledger has the step."""

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Raise RunError. A step that the optimizer has skipped changed nothing."""
        if context.grad_norm is None or context.skipped_iter or math.isfinite(norm := float(context.grad_norm)):
            return
        raise RunError(
            f"the gradient norm of step {context.state.train_state.step + 1} is {norm}; cuda_graph=off stops at the "
            "first gradient that is no number, and tpi bisect finds the operation"
        )


class DeterministicOverhead(Callback):
    """Takes the two costs away (start/bridge.py). Last of the callbacks: it changes the environment,
    which the recorder reads first."""

    def on_train_start(self, context: CallbackContext) -> None:
        """Before the first step."""
        deterministic_mode_without_its_extras()
