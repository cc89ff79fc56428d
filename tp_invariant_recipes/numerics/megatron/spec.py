"""The invariant layer for each stock layer, and Bridge's block specification of them."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.replacement import ours

# Class in a stock specification -> its invariant replacement, as MODULE:CLASS of this package.
SUBSTITUTES = {
    "ColumnParallelLinear": "numerics.megatron.local:InvariantColumnParallelLinear",
    "RowParallelLinear": "numerics.megatron.local:InvariantRowParallelLinear",
    "WrappedTorchNorm": "numerics.megatron.local:InvariantRMSNorm",
    "MambaMixer": "numerics.megatron.mamba:InvariantMambaMixer",
    "TEColumnParallelLinear": "numerics.megatron.te:InvariantTEColumnParallelLinear",
    "TELayerNormColumnParallelLinear": "numerics.megatron.te:InvariantTELayerNormColumnParallelLinear",
    "TERowParallelLinear": "numerics.megatron.te:InvariantTERowParallelLinear",
    "TENorm": "numerics.megatron.te:InvariantTERMSNorm",
    "_TENormWithResidual": "numerics.megatron.te:InvariantTERMSNorm",
    "MoELayer": "numerics.megatron.moe_layer:InvariantMoELayer",
    "TopKRouter": "numerics.megatron.router:InvariantTopKRouter",
    "SequentialMLP": "numerics.megatron.moe_layer:InvariantSequentialMLP",
    "TEGroupedMLP": "numerics.megatron.te:InvariantTEGroupedMLP",
    "DotProductAttention": "numerics.megatron.local:InvariantDotProductAttention",
    "TEDotProductAttention": "numerics.megatron.te:InvariantTEDotProductAttention",
    "LatentAttention": "numerics.megatron.latent_attention:InvariantLatentAttention",
    "LatentDotProductAttention": "numerics.megatron.latent_attention:InvariantLatentDotProductAttention",
    "DuplicatedLinear": "numerics.megatron.latent_attention:InvariantDuplicatedLinear",
    "TELinear": "numerics.megatron.te:InvariantTEDuplicatedLinear",
}
# Norms of queries or keys, which the specification's field tells from other norms.
HEAD_NORMS = {
    "WrappedTorchNorm": "numerics.megatron.local:InvariantHeadNorm",
    "TENorm": "numerics.megatron.te:InvariantTEHeadNorm",
}
HEAD_NORM_FIELDS = ("q_layernorm", "k_layernorm")
# Classes that sum nothing across ranks themselves.
AS_THEY_ARE = (
    "TransformerLayer",
    "SelfAttention",
    "MLP",
    "HybridStack",
    "MambaLayer",
    "MLPLayer",
    "MoETransformerLayer",
    "TEActivationOp",
    "TEColumnParallelGroupedLinear",
    "TERowParallelGroupedLinear",
    "IdentityOp",
    "IdentityFuncOp",
)


def invariant_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Bridge's transformer block with invariant layers. For `model.transformer_layer_spec`."""
    from megatron.bridge.models import gpt_provider
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    local = config.transformer_impl == "local"
    stock = gpt_provider.local_layer_spec if local else gpt_provider.transformer_engine_layer_spec
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    final_norm = ours(SUBSTITUTES["WrappedTorchNorm" if local else "TENorm"])
    own = mode.of(config).layers
    return TransformerBlockSubmodules(layer_specs=[invariant(stock(config), own=own)] * layers, layer_norm=final_norm)


def invariant(part: Any, field: str = "", own: Mapping[str, str] = MappingProxyType({})) -> Any:
    """A part of a specification with every layer replaced by its invariant class.

    part:  a ModuleSpec, a dataclass of submodules, a partial that takes submodules, a list of these, a class, a
           function or None.
    field: the field of the specification that holds the part.
    own:   substitutes that stand before those of the tables.
    Raises ConfigError for a class in none of the tables, since it may sum across ranks.
    """
    if isinstance(part, type):
        table = {**(HEAD_NORMS if field in HEAD_NORM_FIELDS else SUBSTITUTES), **own}
        if part.__name__ in table:
            return ours(table[part.__name__])
        if part.__name__ in AS_THEY_ARE:
            return part
        raise ConfigError(f"{field or 'model'}: {part.__name__} has no invariant version; use numerics=stock")
    if isinstance(part, partial):
        built = invariant(part.func, field, own)
        return partial(built, *part.args, **{k: invariant(v, k, own) for k, v in part.keywords.items()})
    if isinstance(part, list):
        return [invariant(p, field, own) for p in part]
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{f.name: invariant(getattr(part, f.name), f.name, own) for f in fields(part) if f.init})
    return part
