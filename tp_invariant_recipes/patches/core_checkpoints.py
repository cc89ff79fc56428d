"""Checkpoints that Megatron-Core cannot load, saves under other names, or starts a process for."""

import queue
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from tp_invariant_recipes import saved_names
from tp_invariant_recipes.patches import patch
from tp_invariant_recipes.patches.patch import Form, Looks, Patch
from tp_invariant_recipes.start import forking


def queue_in_this_process(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a queue for a save within this process, or Megatron's shared one, whose manager ends with this process."""

    def get_write_results_queue(mp_mode: str | None = None) -> Any:
        from multiprocessing.managers import SyncManager

        from megatron.core.dist_checkpointing.strategies import filesystem_async

        if mp_mode is None and filesystem_async._results_queue is None:
            return queue.Queue()
        if filesystem_async._results_queue is None:
            manager = SyncManager(ctx=get_context(mp_mode))
            manager.start(forking.serve_starter)
            filesystem_async._results_queue = manager.Queue()
        return filesystem_async._results_queue

    return get_write_results_queue


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
            (optimizer, saved[n])
            for n, optimizer in enumerate(self.chained_optimizers)
            if not hasattr(optimizer, "chained_optimizers")
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


def _copy_step(source: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Megatron has it in each group or, of torch's optimizers, once for all parameters."""
    if "common_step" in source.get("state", {}):
        target["state"]["common_step"] = source["state"]["common_step"]
    steps = [group["step"] for group in source["param_groups"] if "step" in group]
    for group in target["param_groups"] if steps else ():
        group["step"] = steps[0]


def with_a_state(original: Callable[..., None]) -> Callable[..., None]:
    """Replace MegatronOptimizer.__init__: an optimizer without a function that makes its state gets SGD's."""

    def __init__(self: Any, optimizer: Any, config: Any, init_state_fn: Callable[..., None] | None = None) -> None:
        original(self, optimizer, config, init_state_fn or momentum)

    return __init__


def momentum(optimizer: Any, config: Any = None) -> None:
    """Make the buffers that torch's SGD makes in its first step. Without momentum, or of another optimizer, none."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))


def _none_for_sgd() -> bool:
    """Whether the installed function makes SGD without a function for its state."""
    made = patch.source("megatron.core", "optimizer/__init__.py", "_get_megatron_optimizer_based_on_param_groups")
    return "init_state_fn = None" in made.partition("optimizer = SGD(")[2].partition("else:")[0]


def as_transformer_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace get_gpt_layer_local_submodules: checkpoints have the names of Transformer Engine's layers."""

    def get_gpt_layer_local_submodules(num_experts: int | None = None, *args: Any, **more: Any) -> Any:
        layer = original(num_experts, *args, **more)
        latent = not layer.sharded_state_dict_keys_map
        attention = saved_names.LATENT_ATTENTION if latent else saved_names.ATTENTION
        return replace(layer, sharded_state_dict_keys_map=attention | ({} if num_experts else saved_names.DENSE))

    return get_gpt_layer_local_submodules


def _shared_key_map() -> bool:
    """Whether the installed function has one table of names, for dense layers without latent attention."""
    function = patch.source("megatron.core", "models/gpt/gpt_layer_specs.py", "get_gpt_layer_local_submodules")
    return function.count("sharded_state_dict_keys_map") == 1


_WRITER = "dist_checkpointing.strategies.filesystem_async"
SAVE = Patch(
    name="core-save-without-manager",
    package="megatron-core",
    need=Looks(
        Form(f"{_WRITER.replace('.', '/')}.py", "get_write_results_queue", has="Manager()"),
        "get_write_results_queue() that makes a Manager()",
    ),
    replaces={f"megatron.core.{_WRITER}:get_write_results_queue": queue_in_this_process},
    why="every save, even one within this process, starts a manager process; that takes seconds, and a killed rank "
    "leaves it behind with 0.3 GB",
)

PATCHES = (
    SAVE,
    Patch(
        name="core-empty-optimizer",
        package="megatron-core",
        need=Looks(
            Form(
                "optimizer/optimizer.py",
                "_split_state_dict",
                has="def sharded_state_dict",
                lacks="LocalNonpersistentObject",
            ),
            "ChainedOptimizer that saves empty lists",
        ),
        replaces={"megatron.core.optimizer.optimizer:ChainedOptimizer.sharded_state_dict": like_the_others},
        why="where a pipeline stage has no experts, its optimizer of experts has no parameters; Megatron-Core saves "
        "empty lists and no step for all stages, or expects them, and a run cannot continue",
        reached=lambda config: config.shape.experts,
    ),
    Patch(
        name="core-sgd-state",
        package="megatron-core",
        need=Looks(_none_for_sgd, "an SGD with init_state_fn = None"),
        replaces={"megatron.core.optimizer.optimizer:MegatronOptimizer.__init__": with_a_state},
        why="with optimizer.optimizer=sgd a run cannot continue: Megatron-Core calls a function that makes the "
        "optimizer's state before it loads a checkpoint, and has none for SGD",
        reached=lambda config: config.section("optimizer").get("optimizer") == "sgd",
    ),
    Patch(
        name="core-local-names",
        package="megatron-core",
        need=Looks(_shared_key_map, "get_gpt_layer_local_submodules() with one sharded_state_dict_keys_map"),
        replaces={"megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_submodules": as_transformer_engine},
        why="with model.transformer_impl=local Megatron-Core saves norms of experts' layers and of latent attention "
        "under other names than with Transformer Engine's layers, so that neither reads the other's checkpoints",
    ),
)
