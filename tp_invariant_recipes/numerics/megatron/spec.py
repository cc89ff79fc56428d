# SPDX-License-Identifier: Apache-2.0
"""The invariant layer for each stock layer, and Bridge's block specification of them."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.models.hybrid import hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_token_prediction as ahead
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from tp_invariant_recipes import saved_names
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.numerics.megatron.covered_layers import AHEAD, LAYERS, SEPARATOR
from tp_invariant_recipes.replacement import resolve_own

FP8_PREFIX = "Fp8"  # before the name of a layer whose GEMMs are in FP8

# Class in a stock specification -> its invariant replacement, as MODULE:CLASS of this package.
SUBSTITUTES = {
    "ColumnParallelLinear": "numerics.megatron.local:InvariantColumnParallelLinear",
    "RowParallelLinear": "numerics.megatron.local:InvariantRowParallelLinear",
    "WrappedTorchNorm": "numerics.megatron.local:InvariantNorm",
    "MambaMixer": "numerics.megatron.families.mamba:InvariantMambaMixer",
    "TEColumnParallelLinear": "numerics.megatron.te_wrappers:InvariantTEColumnParallelLinear",
    "TELayerNormColumnParallelLinear": "numerics.megatron.te_wrappers:InvariantTELayerNormColumnParallelLinear",
    "TERowParallelLinear": "numerics.megatron.te_wrappers:InvariantTERowParallelLinear",
    "TENorm": "numerics.megatron.te_wrappers:InvariantTENorm",
    "_TENormWithResidual": "numerics.megatron.te_wrappers:InvariantTERMSNorm",
    "MoELayer": "numerics.megatron.router:InvariantMoELayer",
    "TopKRouter": "numerics.megatron.router:InvariantTopKRouter",
    "SequentialMLP": "numerics.megatron.router:InvariantSequentialMLP",
    "TEGroupedMLP": "numerics.megatron.te_wrappers:InvariantTEGroupedMLP",
    "DotProductAttention": "numerics.megatron.local:InvariantDotProductAttention",
    "TEDotProductAttention": "numerics.megatron.te_wrappers:InvariantTEDotProductAttention",
    "TrainedMLA": "numerics.megatron.attention.mla:InvariantMLA",
    "MLADotProductAttention": "numerics.megatron.attention.mla:InvariantMLADotProductAttention",
    "DuplicatedLinear": "numerics.megatron.attention.mla:InvariantDuplicatedLinear",
    "TELinear": "numerics.megatron.te_wrappers:InvariantTEDuplicatedLinear",
    "MultiTokenPredictionLayer": "numerics.megatron.mtp:InvariantMultiTokenPredictionLayer",
    "OLMoESelfAttention": "numerics.megatron.families.layers:InvariantOLMoESelfAttention",
    "Gemma3DotProductAttention": "numerics.megatron.families.layers:InvariantGemma3DotProductAttention",
    "Gemma3TEDotProductAttention": "numerics.megatron.te_wrappers:InvariantGemma3TEDotProductAttention",
    "PlainRMSNorm": "numerics.megatron.local:InvariantRMSNorm",
    "GatedDeltaNet": "numerics.megatron.families.delta_net:InvariantGatedDeltaNet",
    "RowParallelLinearLayerNorm": "numerics.megatron.families.layers:InvariantRowParallelLinearLayerNorm",
    "TERowParallelLinearLayerNorm": "numerics.megatron.te_wrappers:InvariantTERowParallelLinearLayerNorm",
}
# Norms of queries or keys, or of a gated delta net's heads, which the specification's field tells from other norms.
HEAD_NORMS = {
    "WrappedTorchNorm": "numerics.megatron.local:InvariantHeadNorm",
    "TENorm": "numerics.megatron.te_wrappers:InvariantTEHeadNorm",
    "PlainRMSNorm": "numerics.megatron.local:InvariantHeadNorm",
}
# Classes in a stock specification whose invariant classes derive first from FP8_MIXIN where GEMMs are in FP8.
FP8_MIXIN = "numerics.megatron.base:Fp8Mixin"
FP8 = (
    "ColumnParallelLinear", "RowParallelLinear", "TEColumnParallelLinear", "TELayerNormColumnParallelLinear",
    "TERowParallelLinear", "SequentialMLP", "TEGroupedMLP",
)  # fmt: skip
HEAD_NORM_FIELDS = ("q_layernorm", "k_layernorm", "out_norm")
# Classes that sum nothing across ranks themselves.
AS_THEY_ARE = (
    "TransformerLayer", "SelfAttention", "Gemma3SelfAttention", "MLP", "HybridStack", "MultiTokenPredictionBlock",
    "MambaLayer", "MLPLayer", "MoETransformerLayer", "TEActivationOp", "TEColumnParallelGroupedLinear",
    "TERowParallelGroupedLinear", "IdentityOp", "IdentityFuncOp",
)  # fmt: skip


def block_of_both(config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's block of dense layers and layers of experts (`model.moe_layer_freq`), as GLM-4.5 has them.

    For `model.transformer_layer_spec`: what Bridge puts there by default makes all layers alike.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    local = config.transformer_impl == "local"
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=not local, normalization=config.normalization, vp_stage=vp_stage
    )
    return replace(block, layer_norm=WrappedTorchNorm) if local else block


def invariant_layer_spec(config: Any, vp_stage: int | None = None, *, family: str | None = None) -> Any:
    """Bridge's transformer block with invariant layers. For `model.transformer_layer_spec`.

    family: a key of families.FAMILIES; None: the layers are those of Bridge's GPT models.
    """
    from megatron.bridge.models import gpt_provider
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    local = config.transformer_impl == "local"
    if family is not None:
        specs = families.block(config, vp_stage, family=family).layer_specs
    elif config.experimental_attention_variant == families.DELTA_NET:
        specs = resolve_own(families.DELTA_BLOCK)(config, vp_stage).layer_specs
    elif config.num_moe_experts and not families.layers_alike(config.moe_layer_freq):
        specs = block_of_both(config, vp_stage).layer_specs
    else:
        stock = gpt_provider.local_layer_spec if local else gpt_provider.transformer_engine_layer_spec
        specs = [stock(config)] * get_num_layers_to_build(config, vp_stage=vp_stage)
    final_norm = resolve_own(SUBSTITUTES["WrappedTorchNorm" if local else "TENorm"])
    return TransformerBlockSubmodules(layer_specs=invariant_layers(specs, config, vp_stage), layer_norm=final_norm)


def invariant_layers(specs: Sequence[Any], config: Any, vp_stage: int | None) -> list[Any]:
    """Return the layers of a stage with invariant parts, those in FP8 with GEMMs in FP8. specs: of stock layers."""
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    own, fp8, start = (
        mode.mode_of(config).layers, getattr(config, "fp8_layers", None), get_transformer_layer_offset(config, vp_stage)
    )  # fmt: skip
    return [
        invariant(spec, own=own, fp8=fp8 is not None and fp8.contains(start + n, config.num_layers))
        for n, spec in enumerate(specs)
    ]


def invariant(part: Any, field: str = "", own: Mapping[str, str] = MappingProxyType({}), *, fp8: bool = False) -> Any:
    """Return a part of a specification with every layer replaced by its invariant class.

    part:  a ModuleSpec, a dataclass of submodules, a partial that takes submodules, a list of these, a class, a
           function or None.
    field: the field of the specification that holds the part.
    own:   substitutes that stand before those of the tables.
    fp8:   whether its GEMMs are in FP8.
    Raises ConfigError for a class in none of the tables, since it may sum across ranks.
    """
    if isinstance(part, type):
        table = {**(HEAD_NORMS if field in HEAD_NORM_FIELDS else SUBSTITUTES), **own}
        if part.__name__ in table:
            substitute = resolve_own(table[part.__name__])
            return _in_fp8(substitute) if fp8 and part.__name__ in FP8 else substitute
        if part.__name__ in AS_THEY_ARE:
            return part
        raise ConfigError(f"{field or 'model'}: {part.__name__} has no invariant version; use numerics=stock")
    if isinstance(part, partial):
        built = invariant(part.func, field, own, fp8=fp8)
        return partial(built, *part.args, **{k: invariant(v, k, own, fp8=fp8) for k, v in part.keywords.items()})
    if isinstance(part, list):
        return [invariant(p, field, own, fp8=fp8) for p in part]
    if is_dataclass(part) and not isinstance(part, type):
        names = [f.name for f in fields(part) if f.init]
        return replace(part, **{name: invariant(getattr(part, name), name, own, fp8=fp8) for name in names})
    return part


@cache
def _in_fp8(layer: type) -> type:
    return type(f"{FP8_PREFIX}{layer.__name__}", (resolve_own(FP8_MIXIN), layer), {"__module__": layer.__module__})


def local_hybrid_spec(config: Any) -> Any:
    """Return a hybrid stack of Megatron-Core's local layers, which Megatron-Core lacks. For `model.hybrid_stack_spec`.

    It equals Megatron's stack with Transformer Engine, except that norms are separate modules. Checkpoints have the
    same names.
    """
    layers = {
        "mamba_layer": _mamba_layer(),
        "attention_layer": _attention_layer(),
        "mlp_layer": _feed_forward_layer(MLPLayer, sharded_state_dict_keys_map=saved_names.DENSE),
    }
    if experts := config.num_moe_experts:
        layers["moe_layer"] = _feed_forward_layer(MoETransformerLayer, experts)
    if config.mtp_num_layers:
        norms = dict.fromkeys(("enorm", "hnorm", "layer_norm"), WrappedTorchNorm)
        parts = ahead.MultiTokenPredictionLayerSubmodules(**norms, eh_proj=ColumnParallelLinear, mtp_model_layer=None)
        layer = ModuleSpec(module=ahead.MultiTokenPredictionLayer, submodules=parts)
        block = ahead.MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
        layers["mtp_block_spec"] = ModuleSpec(module=ahead.MultiTokenPredictionBlock, submodules=block)
    return ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(**layers))


def _mamba_layer() -> Any:
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=WrappedTorchNorm,
            mixer=ModuleSpec(module=MambaMixer, submodules=mixer),
            mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=saved_names.MAMBA,
        ),
    )


def _attention_layer() -> Any:
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=saved_names.ATTENTION,
        ),
    )


def _feed_forward_layer(module: type, experts: int | None = None, **names: Any) -> Any:
    """Return a layer with a dense feed-forward part, or with experts."""
    return ModuleSpec(
        module=module,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=get_mlp_module_spec_for_backend(LocalSpecProvider(), num_experts=experts),
            mlp_bda=get_bias_dropout_add,
            **names,
        ),
    )


def final_norm(original: Any) -> Any:
    """Return the norm at the end of a HybridStack. It exists only with Transformer Engine or on our CPU host; hybrid
    models
    need one of them."""
    absent = original.__name__ == "TENorm" and installed("transformer-engine") is None  # or a placeholder of it
    return original if absent else resolve_own(SUBSTITUTES[original.__name__])


def invariant_hybrid_spec(config: Any) -> Any:
    """Return the local stack, or Megatron's with Transformer Engine, of invariant layers.

    For `model.hybrid_stack_spec`.

    Raises ConfigError for a layer that has no invariant version.
    """
    stock = local_hybrid_spec(config) if config.transformer_impl == "local" else hybrid_layer_specs.hybrid_stack_spec
    signs = set(config.hybrid_layer_pattern) - {SEPARATOR, AHEAD}
    if unknown := sorted(signs - set(LAYERS)):
        raise ConfigError(
            f"model.hybrid_layer_pattern: {' '.join(unknown)} have no invariant version, only {' '.join(LAYERS)} have; "
            f"numerics=stock"
        )
    # Megatron's stack has every kind of layer; kinds that the model does not use need no invariant version.
    in_fp8 = getattr(config, "fp8_layers", None) is not None  # fp8.layers_of_stack says of each layer whether it is
    names = [LAYERS[sign] for sign in signs]
    used = {name: invariant(getattr(stock.submodules, name), fp8=in_fp8) for name in names}
    if config.mtp_num_layers:
        used["mtp_block_spec"] = invariant(stock.submodules.mtp_block_spec)
    return replace(stock, submodules=HybridStackSubmodules(**used))
