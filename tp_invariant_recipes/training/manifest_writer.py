"""The callback that marks a checkpoint finished."""

from pathlib import Path
from typing import Any

from megatron.bridge.training.callbacks import Callback

from tp_invariant_recipes.runs.checkpoints import iteration_dir, write_manifest


class ManifestWriter(Callback):
    """Writes the manifest of each checkpoint as it is finished. For the first rank."""

    def __init__(
        self, identity_hash: str, layout: dict[str, Any], optimizer_state: str, *, experts_apart: bool
    ) -> None:
        self.identity_hash = identity_hash
        self.layout = layout
        self.optimizer_state = optimizer_state
        self.experts_apart = experts_apart

    def on_checkpoint_save(self, context: Any) -> None:
        """Bridge calls this on every rank once all have written."""
        step = context.state.train_state.step
        path = iteration_dir(Path(context.state.cfg.checkpoint.save), step)
        write_manifest(
            path, step, self.identity_hash, self.layout, self.optimizer_state, experts_apart=self.experts_apart
        )
