"""Megatron-Bridge builds the layers of multi-token prediction of Transformer Engine, whatever the others are."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tp_invariant_recipes.patches import code
from tp_invariant_recipes.patches.patch import Looks, Patch
from tp_invariant_recipes.replacement import Replacement

WHY = (
    "with model.transformer_impl=local Megatron-Bridge still asks for Transformer Engine's layers for multi-token "
    "prediction, and fails where it is not installed"
)


def of_the_models_kind(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace mtp_block_spec: local layers for a model of local layers."""

    def mtp_block_spec(config: Any, vp_stage: int | None = None) -> Any:
        if config.transformer_impl != "local" or not config.mtp_num_layers:
            return original(config, vp_stage=vp_stage)
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        layers = config.transformer_layer_spec(config)
        block = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False, vp_stage=vp_stage)
        if block is None:
            return None
        norms = dict.fromkeys(("enorm", "hnorm", "layer_norm"), WrappedTorchNorm)
        return replace(
            block,
            layer_specs=[replace(spec, submodules=replace(spec.submodules, **norms)) for spec in block.layer_specs],
        )

    return mtp_block_spec


def always_transformer_engine() -> bool:
    """Whether the installed function names Transformer Engine's layers alone."""
    function = code.source("megatron.bridge", "models/gpt_provider.py", "mtp_block_spec")
    return "use_transformer_engine=True" in function and "transformer_impl" not in function


PATCH = Patch(
    name="bridge-local-mtp",
    package="megatron-bridge",
    need=Looks(always_transformer_engine, "mtp_block_spec() without model.transformer_impl"),
    replacements=(Replacement("megatron.bridge.models.gpt_provider:mtp_block_spec", of_the_models_kind, WHY),),
    why=WHY,
    concerns=lambda config: config is None or bool(config.model.get("mtp_num_layers")),
)
