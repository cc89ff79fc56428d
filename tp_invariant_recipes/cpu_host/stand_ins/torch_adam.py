# SPDX-License-Identifier: Apache-2.0
"""torch's Adam in Megatron's optimizers, also in the distributed one: where Transformer Engine's cannot run, or is not
wanted, since a library defines its arithmetic.
"""

from collections.abc import Callable
from typing import Any

from tp_invariant_recipes.replacement import Replacement


def _state_before_loading(original: Any) -> Callable[[Any], dict[str, Any]]:
    """Megatron asks a distributed optimizer for its step before it loads a checkpoint, and where the rank has none of
    its parameters. Transformer Engine's Adam has no step then; of torch's Megatron demands one.
    """
    import torch

    def state_dict(self: Any) -> dict[str, Any]:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if not parameters:
            groups = self.optimizer.state_dict()["param_groups"]
            kept = [{name: group[name] for name in group if name != "params"} | {"step": 0.0} for group in groups]
            return {"optimizer": {"param_groups": kept}}
        if not self.optimizer.state:
            for parameter in parameters:
                moments = {key: torch.zeros_like(parameter.data) for key in self.optimizer_state_keys}
                self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        return original(self)

    return state_dict


def _separate_steps(original: Any) -> Callable[[Any, Any], None]:
    """Megatron loads one tensor as the step of all parameters; torch's Adam would add to it once for each."""

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    return load_state_dict


def _without_step(original: Any) -> Callable[[Any, Any, dict[str, Any]], None]:
    """Among what belongs to a parameter Megatron also looks for its step, which a checkpoint has once for all."""
    return lambda self, parameter, tensors: original(self, parameter, {"step": None} | tensors)


def _states_of_empty_shards(original: Any) -> Callable[..., dict[str, Any]]:
    """With FSDP ranks go through the states of all parameters together, even where one has no element of them."""
    import torch

    def sharded_state(self: Any, is_loading: bool = False) -> dict[str, Any]:
        states = self.optimizer.state
        step = max((state["step"] for state in states.values()), default=torch.tensor(0.0))
        for parameter in (parameter for group in self.optimizer.param_groups for parameter in group["params"]):
            if not states[parameter] or not parameter.to_local().numel():  # a step that was loaded grows no further
                moments = {key: torch.zeros_like(parameter) for key in self.optimizer_state_keys}
                states[parameter] = {"step": step.clone(), **moments}
        return original(self, is_loading)

    return sharded_state


_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

REPLACEMENTS = (
    Replacement("megatron.core.optimizer:USING_PYTORCH_OPTIMIZER", lambda _: True,
        "Megatron prefers Transformer Engine's"),
    Replacement(f"{_DISTRIBUTED}.state_dict", _state_before_loading, "torch's Adam has no step before its first one"),
    Replacement(f"{_DISTRIBUTED}.sharded_param_state_fsdp_dtensor", _states_of_empty_shards,
        "torch's Adam has no state of a parameter without a gradient"),
    Replacement(f"{_DISTRIBUTED}.load_state_dict", _separate_steps,
        "torch's Adam counts steps for each parameter, in place"),
    Replacement(f"{_DISTRIBUTED}._set_main_param_and_optimizer_states", _without_step,
        "torch's Adam keeps a step for each parameter, a checkpoint one for all"),
)  # fmt: skip
