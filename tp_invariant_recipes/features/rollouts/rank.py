"""A rank of `tpi generate`: the model with a checkpoint's weights, and completions of requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.features.inference.rank import loaded_for_inference
from tp_invariant_recipes.features.rollouts import lines
from tp_invariant_recipes.features.rollouts.requests import Request
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings.run_config import RunConfig


@dataclass(frozen=True)
class Generate:
    """What a rank does: complete requests, and write each completion when it ends.

    checkpoint: of a run; None: `config.weights.folder` has the weights. folder: of the files of completions.
    tokenizer:  as of `sequences.tokenizer`; None: there is none. options: of `Engine`.
    """

    config: RunConfig
    checkpoint: Path | None
    requests: Sequence[Request]
    folder: Path
    tokenizer: str | None
    options: Mapping[str, Any]

    def __call__(self, run_dir: RunDir, rank_info: Any) -> None:
        """Raise RunError: a log-probability is no number."""
        from megatron.core import parallel_state as state

        decode = sequences.tokenizer(self.tokenizer).decode if self.tokenizer else None
        with loaded_for_inference(self.config, self.checkpoint) as model:
            # Not sooner: the launcher imports this module, and Megatron is imported quietly, by start/bridge.py.
            from tp_invariant_recipes.features.rollouts.engine import Engine

            writes = state.get_tensor_model_parallel_rank() == 0
            rank = state.get_data_parallel_rank()
            write = lines.writer(self.folder, rank, self.requests, decode) if writes else None
            Engine(model, decode=decode, **self.options).generate(self.requests, write)
