"""Rollouts in a trainer's own process, with the weights that it trains: the names that an RL loop needs.

    from tp_invariant_recipes import rollouts
    engine = rollouts.Engine(model)
    completions = engine.generate([rollouts.Request("a", (1, 2, 3), rollouts.Sampling(max_new_tokens=8))])
    engine.refit()          # after the optimizer's step

`Engine` is imported, with torch and Megatron, when it is first read.
"""

from importlib import import_module
from typing import Any

from tp_invariant_recipes.features.rollouts.requests import Completion, Request, Sampling

__all__ = ["Completion", "Engine", "Request", "Sampling"]  # noqa: F822


def __getattr__(name: str) -> Any:
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("tp_invariant_recipes.features.rollouts.engine").Engine
