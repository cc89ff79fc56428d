# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets of a model, and gates: names and sizes (numerics/megatron/families/delta_net.py has the layers)."""

from collections.abc import Mapping
from typing import Any

from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings.model_shape import ModelShape

FREQUENCY, TAPS, RECOMPUTED = "linear_attention_freq", "linear_conv_kernel_dim", "gdn_norm_out"
ATTENTION_GATE, EXPERT_GATE = "attention_output_gate", "moe_shared_expert_gate"
# Megatron-Core's layers, which recipes name; they are built here whatever names them.
SPEC = (
    "megatron.core.models.gpt.experimental_attention_variant_module_specs."
    "get_transformer_block_with_experimental_attention_variant_spec"
)


def has_it(model: Mapping[str, Any]) -> bool:
    """Whether layers of a model, a section of a tree, are gated delta nets."""
    return bool(families.delta_sizes(model))


def sharded(model: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of gated delta nets that V shards divide."""
    return {name: size for name, size in families.delta_sizes(model).items() if name in families.DELTA_HEADS}


def gated_numbers(model: Mapping[str, Any]) -> int:
    """Return the numbers of a sequence that attention's gate multiplies; 0: there is none."""
    shape = ModelShape(model)
    return shape.sequence * shape.heads * shape.head_width if model.get(ATTENTION_GATE) else 0
