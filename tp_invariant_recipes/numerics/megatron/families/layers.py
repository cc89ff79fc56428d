# SPDX-License-Identifier: Apache-2.0
"""Layers of Bridge's families that Megatron-Core's local layers lack, and the same with invariant sums.

    family        a layer's parts that are not GPT's
    OLMoE         one norm over all queries, one over all keys, of all heads together
    Gemma 3       norms before and after both; windows in all layers but one after every few

Bridge has them of Transformer Engine's layers alone; tpi trains stock runs on a CPU with those of this file.
"""

import copy
from typing import Any

import torch
from megatron.bridge.models.gpt_provider import local_layer_spec
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, all_to_all_sp2hp
from megatron.core.transformer import ModuleSpec, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch import Tensor

from tp_invariant_recipes import saved_names
from tp_invariant_recipes.numerics.layers.norm import NormShards
from tp_invariant_recipes.numerics.megatron.local import (
    InvariantDotProductAttention,
    InvariantRMSNorm,
    InvariantRowParallelLinear,
)

POST_NORM_EPS = 1e-5  # Bridge's layers leave the default of Transformer Engine's norm, whatever model.layernorm_epsilon


# --- Norms ---


class PlainRMSNorm(torch.nn.Module):
    """RMSNorm as Transformer Engine has it: in fp32, rounded once, `x · (1 + weight)` if weights are centred at zero.

    Megatron-Core's local norm takes neither such weights nor sequence parallelism.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.offset = eps, 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = torch.nn.Parameter(
            torch.full((hidden_size,), 1.0 - self.offset, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.__dict__["sequence_parallel"] = config.sequence_parallel  # read by Megatron's gradient reduction

    def forward(self, x: Tensor) -> Tensor:
        """[…, h] → the same."""
        weight = self.weight.float() + self.offset
        return torch.nn.functional.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class AfterRow:
    """A norm of what a row-parallel layer returns, for a class that derives from one. after: the norm's class."""

    after: type

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)  # type: ignore[call-arg]
        self.post_layernorm = self.after(config, output_size, POST_NORM_EPS)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[s, b, k/t] → [s/t or s, b, n], and None as bias: the layer has none."""
        return self.post_layernorm(super().forward(x)[0]), None  # type: ignore[misc]


class RowParallelLinearLayerNorm(AfterRow, RowParallelLinear):
    """Bridge's TERowParallelLinearLayerNorm of local layers."""

    after = PlainRMSNorm


class InvariantRowParallelLinearLayerNorm(AfterRow, InvariantRowParallelLinear):
    """Bridge's TERowParallelLinearLayerNorm of local layers, with invariant sums."""

    after = InvariantRMSNorm


# --- OLMoE ---


class NormOfAllHeads(InvariantRMSNorm):
    """RMSNorm over the features of all heads of a token.

    A rank has some heads of all positions. It sends them for all heads of some positions, and takes its own back:
    [s, b, heads/t, d] → [s/t, b, heads · d] → [s, b, heads/t, d]. That moves bytes; the norm is one over rows.
    """

    def shards_of(self) -> NormShards:
        """Between the exchanges the sequence is divided among the ranks."""
        return NormShards.SEQUENCE_SLICE

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, heads/t, d] → the same."""
        group, (length, batch, _, width) = self.mesh_group(), x.shape
        if group.size() == 1:
            return super().forward(x.flatten(2)).view(x.shape)
        rows = all_to_all_hp2sp(x.reshape(length * batch, -1), group).view(length // group.size(), batch, -1)
        return all_to_all_sp2hp(super().forward(rows), group).view(length, batch, -1, width)


class InvariantOLMoESelfAttention(SelfAttention):
    """Attention with one norm over all queries, and one over all keys. Bridge's has them at tp=1 only."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name, heads in (("q", config.num_attention_heads), ("k", config.num_query_groups)):
            norm = NormOfAllHeads(config, heads * config.kv_channels, config.layernorm_epsilon)
            setattr(self, f"{name}_layernorm", norm)


def olmoe(config: Any) -> ModuleSpec:
    """Return a layer of OLMoE."""
    from megatron.bridge.models.olmoe.olmoe_provider import OLMoESelfAttention

    spec = local_layer_spec(config)
    spec.submodules.self_attention.module = OLMoESelfAttention
    return spec


# --- Gemma 3 (arXiv 2503.19786) ---


class Gemma3Windows:
    """Windows of all layers but those of whole attention, for a class of core attention."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        windows = layer_number % sum(config.interleaved_attn_pattern) != 0
        config = copy.copy(config)
        config.window_size = (config.window_size - 1, 0) if windows else None
        super().__init__(config, layer_number, *args, **kwargs)  # type: ignore[call-arg]


class Gemma3DotProductAttention(Gemma3Windows, DotProductAttention):
    """Of stock runs on a CPU."""


class InvariantGemma3DotProductAttention(Gemma3Windows, InvariantDotProductAttention):
    """With launches that no layout changes."""


def gemma3(config: Any) -> ModuleSpec:
    """Return a layer of Gemma 3."""
    from megatron.bridge.models.gemma.gemma3_provider import Gemma3SelfAttention

    of_heads = PlainRMSNorm if config.qk_layernorm else None
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=PlainRMSNorm,
            self_attention=ModuleSpec(
                module=Gemma3SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=Gemma3DotProductAttention,
                    linear_proj=RowParallelLinearLayerNorm,
                    q_layernorm=of_heads,
                    k_layernorm=of_heads,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=PlainRMSNorm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinearLayerNorm),
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=saved_names.ATTENTION | saved_names.DENSE,
        ),
    )
