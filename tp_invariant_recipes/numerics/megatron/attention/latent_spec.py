"""Layer specifications for models with multi-latent attention: DeepSeek-V3, Moonlight, Kimi-K2."""

from dataclasses import replace
from typing import Any

from tp_invariant_recipes.numerics.megatron import spec


def latent_block_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's block of dense layers and layers of experts (`model.moe_layer_freq`). For
    `model.transformer_layer_spec`.

    Its attention is in megatron/attention/latent_attention.py, of Transformer Engine's layers or of Megatron-Core's
    local ones.
    """
    block = spec.block_of_both(config, vp_stage)
    local = config.transformer_impl == "local"
    return replace(block, layer_specs=[_with_own_attention(layer, local=local) for layer in block.layer_specs])


def invariant_latent_block_spec(config: Any, vp_stage: int | None = None) -> Any:
    """`latent_block_spec` with invariant layers. Raises ConfigError for a layer that has no invariant version."""
    block = latent_block_spec(config, vp_stage)
    layers = spec.invariant_layers(block.layer_specs, config, vp_stage)
    return replace(block, layer_specs=layers, layer_norm=spec.invariant(block.layer_norm))


def _with_own_attention(layer: Any, *, local: bool) -> Any:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from tp_invariant_recipes.numerics.megatron.attention import latent_attention as own

    attention = layer.submodules.self_attention
    if attention.module is not MLASelfAttention:  # fused down-projections; the invariant modes refuse them by name
        return layer
    parts = attention.submodules
    down = own.DuplicatedLinear if local else parts.linear_kv_down_proj
    submodules = own.LatentSubmodules(
        linear_q_proj=parts.linear_q_proj,
        linear_q_down_proj=down,
        linear_q_up_proj=parts.linear_q_up_proj,
        linear_kv_down_proj=down,
        linear_kv_up_proj=parts.linear_kv_up_proj,
        q_latent_norm=parts.q_layernorm,
        kv_latent_norm=parts.kv_layernorm,
        core_attention=own.LatentDotProductAttention if local else parts.core_attention,
        linear_proj=parts.linear_proj,
    )
    changed = replace(attention, module=own.LatentAttention, submodules=submodules)
    return replace(layer, submodules=replace(layer.submodules, self_attention=changed))
