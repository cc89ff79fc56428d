# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model and kinds of its layers, typed: each field of Bridge's provider that says one is read here alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class Size:
    """A row of a shape's table: a number of a section `model`.

    otherwise: the number where it says none, a function of the shape; None: every model says it.
    """

    def __init__(self, name: str, otherwise: "Callable[[ModelShape], int] | None" = lambda shape: 0) -> None:
        self.name, self.otherwise = name, otherwise

    def __get__(self, shape: "ModelShape", owner: type) -> int:
        if self.otherwise is None:
            return shape.fields[self.name]
        return shape.fields.get(self.name) or self.otherwise(shape)


class Flag:
    """A row of a shape's table: whether a section `model` has a field set."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, shape: "ModelShape", owner: type) -> bool:
        return bool(shape.fields.get(self.name))


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model, with Megatron-Core's defaults filled in. 0, "" or False: the model has no such part.

    fields: the section `model` of a tree, or of a TransformerConfig. A size that every model has raises KeyError where
            it is missing.
    """

    fields: Mapping[str, Any]

    sequence = Size("seq_length", otherwise=None)  # tokens of a sequence
    vocabulary = Size("vocab_size", otherwise=None)  # tokens that the embedding has rows for
    hidden = Size("hidden_size", otherwise=None)  # features of a token between layers
    heads = Size("num_attention_heads", otherwise=None)  # attention's heads of queries
    groups = Size("num_query_groups", lambda shape: shape.heads)  # attention's heads of keys and values
    head_width = Size("kv_channels", lambda shape: shape.hidden // shape.heads)  # features of a head
    ffn = Size("ffn_hidden_size", lambda shape: 4 * shape.hidden)  # features inside a dense feed-forward part
    layers = Size("num_layers")  # of a GPT model; a hybrid model has its pattern
    depths = Size("mtp_num_layers")  # of MTP
    gated = Flag("gated_linear_unit")  # whether a feed-forward part has a gate
    biased = Flag("add_bias_linear")  # whether linear layers have biases
    head_norms = Flag("qk_layernorm")  # whether queries and keys have norms
    tied = Flag("share_embeddings_and_output_weights")  # whether the output layer has the embedding's weight

    experts = Size("num_moe_experts")  # of a layer
    expert_width = Size("moe_ffn_hidden_size", lambda shape: shape.ffn)  # features inside an expert
    shared_width = Size("moe_shared_expert_intermediate_size")  # features inside the shared experts
    expert_latent = Size("moe_latent_size")  # features that experts see, if not the hidden ones

    latent = Flag("multi_latent_attention")  # whether keys and values come from a latent, which every rank has whole
    query_latent = Size("q_lora_rank")  # features of a query's latent
    key_latent = Size("kv_lora_rank")  # features of the latent of keys and values
    key_width = Size("qk_head_dim")  # features of a key of MLA, without those that positions turn
    turned_key = Size("qk_pos_emb_head_dim")  # features of the key that all its heads share, which positions turn
    value_width = Size("v_head_dim")  # features of its values

    mamba_heads = Size("mamba_num_heads")  # of a Mamba layer
    mamba_width = Size("mamba_head_dim")  # features of a head of it
    mamba_groups = Size("mamba_num_groups")  # each with a B and a C
    mamba_state = Size("mamba_state_dim")  # features of a group's B, and of its C

    @property
    def hybrid(self) -> bool:
        """Whether the provider is of models with a pattern."""
        return "hybrid_layer_pattern" in self.fields

    @property
    def pattern(self) -> str:
        """The letters of a hybrid model's layers; after a slash those of MTP."""
        return self.fields.get("hybrid_layer_pattern") or ""

    @property
    def gates(self) -> int:
        """Matrices that a feed-forward part has before its activation."""
        return 2 if self.gated else 1

    @property
    def expert_layers(self) -> int | list[int]:
        """Which layers have experts: every nth, or a 0 or a 1 for each layer."""
        return self.fields.get("moe_layer_freq") or 1
