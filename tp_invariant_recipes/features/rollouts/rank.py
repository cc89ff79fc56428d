"""A rank of `tpi generate`: the model with a checkpoint's weights, and completions of requests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.features.rollouts.engine import Engine
from tp_invariant_recipes.features.rollouts.requests import Completion, Request
from tp_invariant_recipes.features.score.rank import scoring_model
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings.run_config import RunConfig


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
        with scoring_model(self.config, self.checkpoint) as model:
            decode = sequences.tokenizer(self.tokenizer).decode if self.tokenizer else None
            engine = Engine(model, decode=decode, **self.options)
            engine.generate(self.read(), self._writer())

    def _writer(self) -> Callable[[Completion], None] | None:
        from megatron.core import parallel_state as state

        return self.write(state.get_data_parallel_rank()) if state.get_tensor_model_parallel_rank() == 0 else None
