# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets of Qwen3-Next and Qwen3.5 among layers of attention: the blocks, and the invariant layer.

Only the two projections sum across ranks. in_proj's rows are six segments:

    [ query: shard v0, … | key: shard v0, … | value: shard v0, … | z: … | beta: … | alpha: … ]

The convolution, the rule and the gate take a shard's part of each segment, and out_proj takes the shard's heads. Their
parameters are sharded and every rank has all tokens, so their gradients need no sum across ranks. The norm's weight is
one for all heads: its gradient is a tree over V groups of heads, as those of the norms of queries and keys.

Megatron-Core's own layer needs flash-linear-attention; this one has kernels of its own, and plain torch on a CPU.
"""

from copy import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from tp_invariant_recipes import saved_names
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.kernels.delta_rule import Heads
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.layers.delta_net import gated, gated_delta_rule
from tp_invariant_recipes.numerics.layers.mamba import by_shard, causal_conv, joined_shards
from tp_invariant_recipes.numerics.megatron.base import MixerOnMesh
from tp_invariant_recipes.numerics.sums.weight_gradient import added_by_itself
from tp_invariant_recipes.replacement import Replacement, applied

_UNUSED = Replacement(
    "megatron.core.ssm.gated_delta_net.common:HAVE_FLA", lambda _: True, "the invariant layer calls none of its kernels"
)


def mark_sections(net: Any) -> None:
    """Note the segments of the two split weights on them, as Megatron does for Mamba layers. net: a GatedDeltaNet."""
    net.in_proj.weight.partition_sizes = list(net.in_proj_split_sections)
    net.conv1d.weight.partition_sizes = [net.qk_dim_local_tp, net.qk_dim_local_tp, net.v_dim_local_tp]


class InvariantGatedDeltaNet(MixerOnMesh, GatedDeltaNet):
    """A gated delta net for training, with the parameters, names and checkpoints of GatedDeltaNet."""

    # What Bridge asks of a module whose class it does not know: that is how A_log and dt_bias are split.
    tensor_model_parallel, partition_dim = True, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with applied([_UNUSED]):
            super().__init__(*args, **kwargs)
        self._check()
        mark_sections(self)
        self.in_proj.segments = self.in_proj_split_sections

    def _check(self) -> None:
        config, shards = self.config, self.config.virtual_shards
        problems = [
            problem
            for wrong, problem in (
                (mode.DELTA_NET not in mode.mode_of(config).covers, mode.only(mode.DELTA_NET)),
                (
                    self.num_key_heads % shards,
                    f"numerics.virtual_shards={shards} must divide model.linear_num_key_heads={self.num_key_heads}",
                ),
                (self.conv_kernel_dim != 4, "set model.linear_conv_kernel_dim=4"),
                (self.cp_size > 1, "gated delta nets with cp have no invariant version; cp=1"),
                (self.tp_size > 1 and not config.sequence_parallel, "sp=true at tp > 1"),
            )
            if wrong
        ]
        if problems:
            raise ConfigError("no invariant gated delta net: " + "; ".join(problems))

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> tuple[Tensor, Any]:
        """[s/t or s, b, h] → the same, and out_proj's bias: None. attention_mask: not read, as of stock."""
        if packed_seq_params is not None:
            raise NotImplementedError("packed sequences in gated delta nets have no invariant version")
        shards = self.mesh.local
        projected, _bias = self.in_proj(hidden_states)
        *qkv, z, beta, alpha = projected.split(self.in_proj_split_sections, -1)
        mixed = self._convolved(by_shard(qkv, shards), projected.shape[1])
        y = self._ruled(mixed, by_shard([alpha], shards), by_shard([beta], shards))
        return self.out_proj(gated(self.out_norm(y).flatten(2), z, shards))

    def _convolved(self, x: Tensor, batch: int) -> Tensor:
        """[n, s, b, c] → [n, s, b, c]."""
        weight = by_shard(added_by_itself(self.conv1d.weight).split(self.conv1d.weight.partition_sizes), len(x), 0)
        none = torch.zeros(weight.shape[:2], dtype=weight.dtype, device=weight.device)
        return causal_conv(x.flatten(1, 2), weight.squeeze(2), none, batch).view(x.shape)

    def _ruled(self, x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        """[n, s, b, q | k | v], [n, s, b, heads] twice → [s, b, n · heads, value]."""
        shards = self.mesh.shards
        sizes = Heads(
            self.num_key_heads // shards, self.num_value_heads // shards, self.key_head_dim, self.value_head_dim
        )
        log_a, dt_bias = (added_by_itself(p).view(len(x), -1) for p in (self.A_log, self.dt_bias))
        y = gated_delta_rule(x, alpha, beta, log_a, dt_bias, sizes)
        return joined_shards(y).unflatten(-1, (-1, self.value_head_dim))


def block(config: Any, vp_stage: int | None = None) -> Any:
    """Return the stock block of a stage: Megatron's, or one of Megatron-Core's local layers, which it lacks.

    For `model.transformer_layer_spec`. `model.linear_attention_freq` says which layers are gated delta nets.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    if config.transformer_impl != "local":
        return get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage)
    without = copy(config)
    without.experimental_attention_variant = None  # Megatron's function refuses it
    plain = get_gpt_decoder_block_spec(
        without, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    start = get_transformer_layer_offset(config, vp_stage)
    linear = get_linear_attention_pattern(config)[start : start + len(plain.layer_specs)]
    layers = [_with_net(spec) if net else spec for spec, net in zip(plain.layer_specs, linear, strict=True)]
    return replace(plain, layer_specs=layers, layer_norm=WrappedTorchNorm)


def _with_net(layer: Any) -> Any:
    net = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
    names = layer.submodules.sharded_state_dict_keys_map | saved_names.DELTA_NET
    attention = ModuleSpec(module=GatedDeltaNet, submodules=net)
    parts = replace(layer.submodules, self_attention=attention, sharded_state_dict_keys_map=names)
    return replace(layer, submodules=parts)
