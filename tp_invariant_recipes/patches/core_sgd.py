"""Megatron-Core cannot load the checkpoints of SGD that it saves."""

from collections.abc import Callable
from typing import Any

from tp_invariant_recipes.patches import code
from tp_invariant_recipes.patches.patch import Looks, Patch

WHY = (
    "with optimizer.optimizer=sgd a run cannot continue: Megatron-Core calls a function that makes the optimizer's "
    "state before it loads a checkpoint, and has none for SGD"
)


def with_a_state(original: Callable[..., None]) -> Callable[..., None]:
    """Replace MegatronOptimizer.__init__: an optimizer without such a function makes SGD's state."""

    def __init__(self: Any, optimizer: Any, config: Any, init_state_fn: Callable[..., None] | None = None) -> None:
        original(self, optimizer, config, init_state_fn or momentum)

    return __init__


def momentum(optimizer: Any, config: Any = None) -> None:
    """Make the buffers that torch's SGD makes in its first step. Without momentum, or of another optimizer, none."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))


def none_for_sgd() -> bool:
    """Whether the installed function makes SGD without a function for its state."""
    made = code.source("megatron.core", "optimizer/__init__.py", "_get_megatron_optimizer_based_on_param_groups")
    return "init_state_fn = None" in made.partition("optimizer = SGD(")[2].partition("else:")[0]


PATCH = Patch(
    name="core-sgd-state",
    package="megatron-core",
    need=Looks(none_for_sgd, "an SGD with init_state_fn = None"),
    replaces={"megatron.core.optimizer.optimizer:MegatronOptimizer.__init__": with_a_state},
    why=WHY,
    concerns=lambda config: config is None or config.section("optimizer").get("optimizer") == "sgd",
)
