# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention (DeepSeek-V2, arXiv 2405.04434): Megatron's layer, and the same with invariant sums.

A token's keys and values come from one latent vector, and those of its query from another one where q_lora_rank is set.
The down-projections to the latents are not split by tensor parallelism: each rank holds them whole and multiplies its
slice of the sequence, so their weight gradients are sums over ranks. All heads share one rotary key, so its gradient is
one, too. The up-projections are column-parallel layers like any other.

    sum                          tree over      each part
    down-projection's gradient   V chunks       GEMMs of a chunk's tokens (partial_linear.py)
    rotary key's gradient        V shards       heads of a shard, one after the other in fp32 (spread_over_heads)

Megatron-Core 0.19 cannot build the layer of its local parts: DotProductAttention takes no width of values. And where
q_lora_rank is not set, it builds a norm before linear_q_proj that no published model has (Megatron-Bridge issue 5261).
So `TrainedMLA` builds the layer as its specification says.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MultiLatentAttention
from torch import Tensor

from tp_invariant_recipes.cpu_host.stand_ins.layers import DuplicatedLinear
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.layers.linear import partial_linear
from tp_invariant_recipes.numerics.megatron import spec
from tp_invariant_recipes.numerics.megatron.base import OnMegatronsMesh, OnMesh
from tp_invariant_recipes.numerics.megatron.local import InvariantDotProductAttention
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import tree_all_reduce


@dataclass
class MLASubmodules:
    """The parts of the layer. The norms are of latents, which every rank has whole, and not of heads."""

    linear_q_proj: Any
    linear_q_down_proj: Any
    linear_q_up_proj: Any
    linear_kv_down_proj: Any
    linear_kv_up_proj: Any
    q_latent_norm: Any
    kv_latent_norm: Any
    core_attention: Any
    linear_proj: Any


class TrainedMLA(MLASelfAttention):
    """Megatron's layer of the parts that its specification names; parameters have Megatron's names."""

    def __init__(
        self,
        config: Any,
        submodules: MLASubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        pg_collection: Any = None,
        **more: Any,
    ) -> None:
        groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
        # MLASelfAttention's own would choose other parts.
        MultiLatentAttention.__init__(
            self, config, submodules, layer_number, attn_mask_type, attention_type="self", pg_collection=groups, **more
        )
        hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
        if rank is None:
            self.linear_q_proj = self._up(submodules.linear_q_proj, hidden, heads * self.q_head_dim, "q_proj")
        else:
            self.linear_q_down_proj = self._down(submodules.linear_q_down_proj, rank, "q_down_proj")
            self.linear_q_up_proj = self._up(submodules.linear_q_up_proj, rank, heads * self.q_head_dim, "q_up_proj")
            self.q_layernorm = self._norm(submodules.q_latent_norm, rank)
        latent, features = config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim)
        width = latent + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = self._down(submodules.linear_kv_down_proj, width, "kv_down_proj")
        self.linear_kv_up_proj = self._up(submodules.linear_kv_up_proj, latent, features, "kv_up_proj")
        self.kv_layernorm = self._norm(submodules.kv_latent_norm, latent)

    def _down(self, part: Any, features: int, name: str) -> Any:
        return part(
            self.config.hidden_size, features, parallel_mode="duplicated", skip_weight_param_allocation=False,
            **self._linear(name),
        )  # fmt: skip

    def _up(self, part: Any, inputs: int, features: int, name: str) -> Any:
        return part(inputs, features, gather_output=False, tp_group=self.pg_collection.tp, **self._linear(name))

    def _linear(self, name: str) -> dict[str, Any]:
        return {
            "config": self.config, "init_method": self.config.init_method, "bias": False, "skip_bias_add": False,
            "is_expert": False, "tp_comm_buffer_name": name,
        }  # fmt: skip

    def _norm(self, part: Any, width: int) -> Any:
        return part(hidden_size=width, config=self.config, eps=self.config.layernorm_epsilon)


class InvariantMLA(OnMesh, TrainedMLA):
    """MLA with invariant parts, and an invariant gradient of the key that all heads share."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if problems := _beyond(config):
            raise ConfigError("; ".join(problems))
        super().__init__(config, *args, **kwargs)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """[s/t, b, h] → query and key [s, b, heads/t, qk], value [s, b, heads/t, v], and both latents.

        Here qk is qk_head_dim + qk_pos_emb_head_dim, whose last part carries the position, and v is v_head_dim.
        """
        if packed_seq_params is not None or inference_context is not None or inference_params is not None:
            raise NotImplementedError("packed sequences and inference have no invariant version")
        config, heads = self.config, self.num_attention_heads_per_partition
        own, rotary = config.qk_head_dim, config.qk_pos_emb_head_dim
        q_latent, kv_combined = self._qkv_down_projection(hidden_states)
        kv_latent, k_pe = kv_combined.split([config.kv_lora_rank, rotary], -1)
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(q_latent)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(q_latent))
        keys_values, _ = self.linear_kv_up_proj(self.kv_layernorm(kv_latent))
        q_nope, q_pe = query.unflatten(-1, (heads, -1)).split([own, rotary], -1)
        key, value = keys_values.unflatten(-1, (heads, -1)).split([own, config.v_head_dim], -1)
        if self.mesh.size > 1:  # backward takes this rank's slice, since `spread_over_heads` has the whole sum
            k_pe = gather_from_sequence_parallel_region(k_pe, tensor_parallel_output_grad=False, group=self.tp_group)
        rotate = self._rotation(len(query))
        q_pe, k_pe = rotate(q_pe), rotate(k_pe.unsqueeze(-2))
        query = torch.cat([q_nope, q_pe], -1)
        key = torch.cat([key, spread_over_heads(k_pe, heads, self.mesh)], -1)
        return query, key, value.contiguous(), q_latent, kv_latent

    def _rotation(self, length: int) -> Callable[[Tensor], Tensor]:
        """Return a function that turns [s, b, heads, d] by the positions; each element by itself."""
        embedding = self.rotary_pos_emb(length)
        angles, scale = embedding if isinstance(embedding, tuple) else (embedding, 1.0)
        return lambda x: apply_rotary_pos_emb(
            x, angles, config=self.config, mscale=scale, cp_group=self.pg_collection.cp, mla_rotary_interleaved=True
        )


def _beyond(config: Any) -> list[str]:
    """List what the layer does not cover, in the words of check/invariant/model.py; for programs of their own, too."""
    split = config.tensor_model_parallel_size > 1 and not config.sequence_parallel
    fields = {
        "sequence_parallel=False": split,
        "context_parallel_size": max(config.context_parallel_size, getattr(config, "context_shards", 1)) > 1,
        "apply_rope_fusion": config.apply_rope_fusion,
        "cache_mla_latents": config.cache_mla_latents,
        "recompute_granularity": config.recompute_granularity is not None,
        f"numerics={config.invariant_mode}": mode.LATENT not in mode.mode_of(config).covers,
    }
    return [f"multi-latent attention has no invariant version with {name}" for name, is_so in fields.items() if is_so]


# --- Down-projections ---


class DuplicatedForward(OnMegatronsMesh):
    """Forward of a layer that every rank holds whole."""

    tensor_model_parallel = False
    weight: Any

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[s/t, b, k] → [s/t, b, n], and None as bias."""
        products = mode.mode_of(self.config).operands().products
        return partial_linear(x, self.weight, self.mesh, products.gemm), None


class InvariantDuplicatedLinear(DuplicatedForward, DuplicatedLinear):
    """The local one."""


# --- The rotary key ---


def spread_over_heads(key: Tensor, heads: int, mesh: VirtualMesh) -> Tensor:
    """One key for all heads of this rank.

    key:     [s, b, 1, d], the same on every rank.
    returns: [s, b, heads, d], heads/t of the model's; not to be written to.

    The gradient is the sum over the heads of all ranks, on every rank: of a shard's heads one after the other in fp32,
    of the V shards as a tree, rounded once.
    """
    return _Spread.apply(key, heads, mesh)


class _Spread(LayerFunction):
    @staticmethod
    def forward(ctx: Any, key: Tensor, heads: int, mesh: VirtualMesh) -> Tensor:
        ctx.mesh = mesh
        return key.expand(-1, -1, heads, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        shards = gradients[0].unflatten(2, (ctx.mesh.local, -1)).float()
        first, *others = shards.unbind(3)
        total = first.clone()
        for shard in others:
            total.add_(shard)
        partials = total.permute(2, 0, 1, 3).contiguous()  # [V/t, s, b, d]
        return tree_all_reduce(partials, ctx.mesh, gradients[0].dtype).unsqueeze(2), None, None


# --- Core attention ---


class MLADotProductAttention(DotProductAttention):
    """Megatron-Core's local attention, told of heads' widths. It reads the widths of queries and keys from these."""

    def __init__(
        self, config: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels


class InvariantMLADotProductAttention(InvariantDotProductAttention, MLADotProductAttention):
    """MLA's core on the heads of a virtual shard."""


def mla_block_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's block of dense layers and layers of experts (`model.moe_layer_freq`). For
    `model.transformer_layer_spec`.

    Its attention is in megatron/attention/mla.py, of Transformer Engine's layers or of Megatron-Core's
    local ones.
    """
    block = spec.block_of_both(config, vp_stage)
    local = config.transformer_impl == "local"
    return replace(block, layer_specs=[_with_own_attention(layer, local=local) for layer in block.layer_specs])


def invariant_mla_block_spec(config: Any, vp_stage: int | None = None) -> Any:
    """`mla_block_spec` with invariant layers. Raises ConfigError for a layer that has no invariant version."""
    block = mla_block_spec(config, vp_stage)
    layers = spec.invariant_layers(block.layer_specs, config, vp_stage)
    return replace(block, layer_specs=layers, layer_norm=spec.invariant(block.layer_norm))


def _with_own_attention(layer: Any, *, local: bool) -> Any:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    attention = layer.submodules.self_attention
    if attention.module is not MLASelfAttention:  # fused down-projections; the invariant modes refuse them by name
        return layer
    parts = attention.submodules
    down = DuplicatedLinear if local else parts.linear_kv_down_proj
    submodules = MLASubmodules(
        linear_q_proj=parts.linear_q_proj,
        linear_q_down_proj=down,
        linear_q_up_proj=parts.linear_q_up_proj,
        linear_kv_down_proj=down,
        linear_kv_up_proj=parts.linear_kv_up_proj,
        q_latent_norm=parts.q_layernorm,
        kv_latent_norm=parts.kv_layernorm,
        core_attention=MLADotProductAttention if local else parts.core_attention,
        linear_proj=parts.linear_proj,
    )
    changed = replace(attention, module=TrainedMLA, submodules=submodules)
    return replace(layer, submodules=replace(layer.submodules, self_attention=changed))
