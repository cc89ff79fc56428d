"""Megatron-Core's local layers save norms before experts, and those of latent attention, under names of their own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tp_invariant_recipes.patches import code
from tp_invariant_recipes.patches.patch import Looks, Patch
from tp_invariant_recipes.replacement import Replacement

WHY = (
    "with model.transformer_impl=local Megatron-Core saves norms of experts' layers and of latent attention under "
    "other names than with Transformer Engine's layers, so that neither reads the other's checkpoints"
)
# A norm of local layers -> its name in a checkpoint, which is that of Transformer Engine's norm and linear in one.
_DENSE = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_ATTENTION = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_LATENT = {
    f"self_attention.{part}_layernorm.": f"self_attention.linear_{part}_up_proj.layer_norm_" for part in ("q", "kv")
}


def as_transformer_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces get_gpt_layer_local_submodules: checkpoints have the names of Transformer Engine's layers."""

    def get_gpt_layer_local_submodules(num_experts: int | None = None, *args: Any, **more: Any) -> Any:
        layer = original(num_experts, *args, **more)
        latent = not layer.sharded_state_dict_keys_map
        names = (_LATENT if latent else _ATTENTION) | ({} if num_experts else _DENSE)
        return replace(layer, sharded_state_dict_keys_map=names)

    return get_gpt_layer_local_submodules


def one_map_for_all() -> bool:
    """Whether the installed function has one table of names, for dense layers without latent attention."""
    core = code.folder("megatron.core")
    file = core / "models/gpt/gpt_layer_specs.py" if core else None
    source = file.read_text(encoding="utf-8") if file and file.is_file() else ""
    function = source.partition("def get_gpt_layer_local_submodules")[2].partition("\ndef ")[0]
    return function.count("sharded_state_dict_keys_map") == 1


PATCH = Patch(
    name="core-local-names",
    package="megatron-core",
    need=Looks(one_map_for_all, "get_gpt_layer_local_submodules() with one sharded_state_dict_keys_map"),
    replacements=(
        Replacement(
            "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_submodules", as_transformer_engine, WHY
        ),
    ),
    why=WHY,
)
