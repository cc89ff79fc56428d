"""One row of the table of what the invariant numerics cannot cover, and the rows that several parts of a model have."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.settings import cuda_graphs
from tp_invariant_recipes.settings.run_config import RunConfig

Test = Callable[[RunConfig], Any]


@dataclass(frozen=True)
class Limit:
    """wrong: whether a run is beyond what is covered. why: what there is no invariant version of yet."""

    wrong: Test
    why: str


def of(applies: Test, wrong: Test, why: str) -> Limit:
    """A row of the runs to which something applies."""
    return Limit(lambda t: applies(t) and wrong(t), why)


def lacks(feature: str) -> Test:
    """Whether a run's mode has no invariant version of one of the features of numerics/mode.py."""
    return lambda t: not t.numerics.covers(feature)


def cuts_sequences(config: RunConfig) -> bool:
    """Whether sequences are cut, on one rank or several."""
    return config.model["context_parallel_size"] > 1 or (config.numerics.context_shards or 1) > 1


def has(field: str) -> Test:
    """Whether a field of the model is set to anything."""
    return lambda t: t.model.get(field)


def uncut(what: str) -> tuple[Test, str]:
    """Of what takes whole sequences. what: with its verb, such as "LoRA has"."""
    return cuts_sequences, f"{what} no version with context shards; cp=1, and leave numerics.context_shards out"


def uncaptured(what: str, instead: str = "") -> tuple[Test, str]:
    """Of what no CUDA graph holds. what: with its verb, such as "adapters have". instead: another key, or none."""
    return lambda t: cuda_graphs.requested(t.model), f"{what} not been captured in CUDA graphs; cuda_graph=off{instead}"


def unsplit(what: str) -> tuple[Test, str]:
    """Of what takes part in tensor parallelism with sequence parallelism alone. what: with its verb."""

    def split(config: RunConfig) -> bool:
        return config.model["tensor_model_parallel_size"] > 1 and not config.model["sequence_parallel"]

    return split, f"{what} sequence parallelism; sp=true"
