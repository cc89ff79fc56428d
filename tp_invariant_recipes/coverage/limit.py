"""One row of the table of what the invariant numerics cannot cover."""

from collections.abc import Callable
from dataclasses import dataclass

from tp_invariant_recipes.settings.run_config import RunConfig


@dataclass(frozen=True)
class Limit:
    """wrong: whether a run is beyond what is covered. why: what there is no invariant version of yet."""

    wrong: Callable[[RunConfig], bool]
    why: str


def lacks(feature: str) -> Callable[[RunConfig], bool]:
    """Whether a run's mode has no invariant version of one of the features of numerics/mode.py."""
    return lambda t: not t.numerics.covers(feature)


def cuts_sequences(config: RunConfig) -> bool:
    """Whether sequences are cut, on one rank or several."""
    return config.model["context_parallel_size"] > 1 or (config.numerics.context_shards or 1) > 1


def is_set(field: str) -> Callable[[RunConfig], bool]:
    """Whether a field of the model is set to anything."""
    return lambda t: bool(t.model.get(field))
