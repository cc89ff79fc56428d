"""A rank of `tpi generate`: the model with a checkpoint's weights, and completions of requests."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.features.rollouts.engine import Engine
from tp_invariant_recipes.features.rollouts.requests import Completion, Request
from tp_invariant_recipes.features.score.rank import leave, loaded_model
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sources import recipe_layer
from tp_invariant_recipes.start import bridge
from tp_invariant_recipes.training import heartbeat
from tp_invariant_recipes.training.heartbeat import Phase


@dataclass(frozen=True)
class Generate:
    """What a rank does: complete requests, and have each completion written when it ends.

    checkpoint: of a run; None: `config.weights.folder` has the weights. read: the requests, the same on every rank.
    write:      called once with the data-parallel rank, by one of its ranks: what writes that rank's completions.
    tokenizer:  as of `sequences.tokenizer`; None: there is none. options: of `Engine`.
    """

    config: RunConfig
    checkpoint: Path | None
    read: Callable[[], Sequence[Request]]
    write: Callable[[int], Callable[[Completion], None]]
    tokenizer: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, run_dir: RunDir, rank_info: Any) -> None:
        """Raise RunError: a log-probability is no number."""
        bridge.load()
        heartbeat.sign(Phase.SETTING_UP)
        recipe_layer.enter(self.config.recipe)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            model = loaded_model(stack, self.config, self.checkpoint)
            decode = sequences.tokenizer(self.tokenizer)[1] if self.tokenizer else None
            engine = Engine(model, decode=decode, **self.options)
            engine.generate(self.read(), self._writer())
            dist.barrier()
            leave()

    def _writer(self) -> Callable[[Completion], None] | None:
        from megatron.core import parallel_state as state

        return self.write(state.get_data_parallel_rank()) if state.get_tensor_model_parallel_rank() == 0 else None
