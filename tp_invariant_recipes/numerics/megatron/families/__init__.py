# SPDX-License-Identifier: Apache-2.0
"""Families whose layers Bridge builds by a specification of their own: which run has which, and their local layers.

A run has one where `model.transformer_layer_spec` names Bridge's function, or where its provider does by default.
Bridge's functions are of Transformer Engine's layers; those of Megatron-Core's local ones are in layers.py.
mamba.py and delta_net.py have what stands in attention's place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.replacement import resolve_own

BLOCK = f"{__name__}.block"
FIELD, PROVIDER = "transformer_layer_spec", "_target_"
_MODELS = "megatron.bridge.models"


@dataclass(frozen=True)
class Layers:
    """The layers of one family.

    spec:     Bridge's function. provider: Bridge's class that has it by default; "": none.
    local:    MODULE:FUNCTION of this package, which makes a layer's specification of Megatron-Core's local layers.
    norms:    of each of a layer's two parts: before it or after it, or both. after: whether one is after it.
    """

    spec: str
    provider: str
    local: str
    norms: int = 1
    after: bool = True


FAMILIES = {
    "OLMoE": Layers(
        f"{_MODELS}.olmoe.olmoe_provider.olmoe_layer_spec",
        f"{_MODELS}.olmoe.olmoe_provider.OlMoEModelProvider",
        "numerics.megatron.families.layers:olmoe",
        after=False,
    ),
    "Gemma 3": Layers(
        f"{_MODELS}.gemma.gemma3_provider.gemma3_layer_spec",
        f"{_MODELS}.gemma.gemma3_provider.Gemma3ModelProvider",
        "numerics.megatron.families.layers:gemma3",
        norms=2,
    ),
}
# No family by name: `model.experimental_attention_variant` puts gated delta nets among the layers of any GPT model.
DELTA_NET, VARIANT = "gated_delta_net", "experimental_attention_variant"
DELTA_BLOCK = "numerics.megatron.families.delta_net:block"
DELTA_HEADS = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}  # with Megatron-Core's defaults
DELTA_SIZES = DELTA_HEADS | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
OF_ALL_HEADS = "OLMoE"  # one norm of the queries of all heads, and one of the keys
TWO_BASES = "Gemma 3"  # rotary positions of local layers, and of global ones
PROVIDERS = tuple(family.provider for family in FAMILIES.values() if family.provider)


def family_of(model: Mapping[str, Any]) -> str | None:
    """Return the family, a key of FAMILIES, whose layers a model has. model: a section `model` of a tree."""
    spec, provider = model.get(FIELD), model.get(PROVIDER)
    return next(
        (
            name
            for name, family in FAMILIES.items()
            if (family.spec == spec if spec else family.provider == (provider or None))
        ),
        None,
    )


def delta_sizes(model: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of a model's gated delta nets, with Megatron-Core's defaults; nothing: it has none."""
    has_it = model.get(VARIANT) == DELTA_NET
    return {name: model.get(name) or default for name, default in DELTA_SIZES.items()} if has_it else {}


def delta_widths(model: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of all heads of a gated delta net: features of its keys, and of its values, and heads of values; zeros: none."""
    sizes = delta_sizes(model)
    if not sizes:
        return 0, 0, 0
    keys, values, key, value = (sizes[name] for name in DELTA_SIZES)
    return keys * key, values * value, values


def block(config: Any, vp_stage: int | None = None, *, family: str) -> Any:
    """Return the stock block of a family: of Megatron-Core's local layers, or Bridge's.

    For `model.transformer_layer_spec`.

    family: a key of FAMILIES.
    """
    from pkgutil import resolve_name

    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    from tp_invariant_recipes.numerics.megatron.families.layers import PlainRMSNorm

    local = config.transformer_impl == "local"
    row = FAMILIES[family]
    spec = (resolve_own(row.local) if local else resolve_name(row.spec))(config)
    attention = spec.submodules.self_attention.submodules
    if config.qk_layernorm and attention.q_layernorm is None:  # then SelfAttention builds this norm by name
        attention.q_layernorm = attention.k_layernorm = TENorm
    return TransformerBlockSubmodules(
        layer_specs=[spec] * get_num_layers_to_build(config, vp_stage=vp_stage),
        layer_norm=PlainRMSNorm if local else TENorm,
    )


def layers_alike(frequency: Any) -> bool:
    """Whether `model.moe_layer_freq` makes every layer one of experts."""
    return all(frequency) if isinstance(frequency, list | tuple) else (frequency or 1) == 1
