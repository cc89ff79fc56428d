"""Megatron-Core saves an optimizer without parameters of this rank as one that has made no step."""

from collections.abc import Callable, Mapping
from typing import Any

from tp_invariant_recipes.patches import code
from tp_invariant_recipes.patches.patch import Looks, Patch

WHY = (
    "where a pipeline stage has no experts, its optimizer of experts has no parameters; Megatron-Core saves empty "
    "lists and no step for all stages, or expects them, and a run cannot continue"
)


def like_the_others(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ChainedOptimizer.sharded_state_dict: what an optimizer without parameters saves is true of all ranks.

    It takes the step of another optimizer of its kind, and its lists of parameters stay on this rank.
    """

    def sharded_state_dict(self: Any, model: Any, is_loading: bool = False, **kwargs: Any) -> Any:
        from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
        from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

        saved = original(self, model, is_loading, **kwargs)
        if len(self.chained_optimizers) == 1:
            return saved
        single = [
            (optimizer, saved[n]) for n, optimizer in enumerate(self.chained_optimizers) if not _is_chain(optimizer)
        ]
        for optimizer, state in single:
            if any(group["params"] for group in optimizer.param_groups):
                continue
            for other, its in single:
                if type(other.optimizer) is type(optimizer.optimizer) and any(g["params"] for g in other.param_groups):
                    _copy_step(its.get("optimizer", its), state.get("optimizer", state))
            if "fp32_from_fp16_params" in state and not isinstance(self, LayerWiseDistributedOptimizer):
                state["fp32_from_fp16_params"] = LocalNonpersistentObject(state["fp32_from_fp16_params"])
        return saved

    return sharded_state_dict


def _is_chain(optimizer: Any) -> bool:
    return hasattr(optimizer, "chained_optimizers")


def _copy_step(source: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Megatron has it in each group or, of torch's optimizers, once for all parameters."""
    if "common_step" in source.get("state", {}):
        target["state"]["common_step"] = source["state"]["common_step"]
    steps = [group["step"] for group in source["param_groups"] if "step" in group]
    for group in target["param_groups"] if steps else ():
        group["step"] = steps[0]


def as_the_rank_has_it() -> bool:
    """Whether the installed optimizers pass on what each of them has on a rank."""
    chained = code.source("megatron.core", "optimizer/optimizer.py", "_split_state_dict")
    return "def sharded_state_dict" in chained and "LocalNonpersistentObject" not in chained


PATCH = Patch(
    name="core-empty-optimizer",
    package="megatron-core",
    need=Looks(as_the_rank_has_it, "ChainedOptimizer that saves empty lists"),
    replaces={"megatron.core.optimizer.optimizer:ChainedOptimizer.sharded_state_dict": like_the_others},
    why=WHY,
    concerns=lambda config: config is None or bool(config.shape.experts),
)
