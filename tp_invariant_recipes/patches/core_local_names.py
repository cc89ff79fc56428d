"""Megatron-Core's local layers save norms before experts, and those of latent attention, under names of their own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tp_invariant_recipes import saved_names
from tp_invariant_recipes.patches import code
from tp_invariant_recipes.patches.patch import Looks, Patch

WHY = (
    "with model.transformer_impl=local Megatron-Core saves norms of experts' layers and of latent attention under "
    "other names than with Transformer Engine's layers, so that neither reads the other's checkpoints"
)


def as_transformer_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace get_gpt_layer_local_submodules: checkpoints have the names of Transformer Engine's layers."""

    def get_gpt_layer_local_submodules(num_experts: int | None = None, *args: Any, **more: Any) -> Any:
        layer = original(num_experts, *args, **more)
        latent = not layer.sharded_state_dict_keys_map
        attention = saved_names.LATENT_ATTENTION if latent else saved_names.ATTENTION
        return replace(layer, sharded_state_dict_keys_map=attention | ({} if num_experts else saved_names.DENSE))

    return get_gpt_layer_local_submodules


def shared_key_map() -> bool:
    """Whether the installed function has one table of names, for dense layers without latent attention."""
    function = code.source("megatron.core", "models/gpt/gpt_layer_specs.py", "get_gpt_layer_local_submodules")
    return function.count("sharded_state_dict_keys_map") == 1


PATCH = Patch(
    name="core-local-names",
    package="megatron-core",
    need=Looks(shared_key_map, "get_gpt_layer_local_submodules() with one sharded_state_dict_keys_map"),
    replaces={"megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_submodules": as_transformer_engine},
    why=WHY,
)
