"""Sizes of a model and kinds of its layers, typed: each field of Bridge's provider that says one is read here alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model, with Megatron-Core's defaults filled in. 0, "" or False: the model has no such part.

    fields: the section `model` of a tree, or of a TransformerConfig. A size that every model has raises KeyError where
            it is missing.
    """

    fields: Mapping[str, Any]

    def _number(self, name: str) -> int:
        return self.fields.get(name) or 0

    @property
    def sequence(self) -> int:
        """Tokens of a sequence."""
        return self.fields["seq_length"]

    @property
    def vocabulary(self) -> int:
        """Tokens that the embedding has rows for."""
        return self.fields["vocab_size"]

    @property
    def hidden(self) -> int:
        """Features of a token between layers."""
        return self.fields["hidden_size"]

    @property
    def layers(self) -> int:
        """Layers of a GPT model. A hybrid model has its pattern."""
        return self._number("num_layers")

    @property
    def hybrid(self) -> bool:
        """Whether the provider is of models with a pattern."""
        return "hybrid_layer_pattern" in self.fields

    @property
    def pattern(self) -> str:
        """The letters of a hybrid model's layers; after a slash those of multi-token prediction."""
        return self.fields.get("hybrid_layer_pattern") or ""

    @property
    def heads(self) -> int:
        """Attention's heads of queries."""
        return self.fields["num_attention_heads"]

    @property
    def groups(self) -> int:
        """Attention's heads of keys and values."""
        return self._number("num_query_groups") or self.heads

    @property
    def head_width(self) -> int:
        """Features of a head."""
        return self._number("kv_channels") or self.hidden // self.heads

    @property
    def ffn(self) -> int:
        """Features inside a dense feed-forward part."""
        return self._number("ffn_hidden_size") or 4 * self.hidden

    @property
    def gated(self) -> bool:
        """Whether a feed-forward part has a gate."""
        return bool(self.fields.get("gated_linear_unit"))

    @property
    def gates(self) -> int:
        """Matrices that a feed-forward part has before its activation."""
        return 2 if self.gated else 1

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return self._number("num_moe_experts")

    @property
    def expert_layers(self) -> int | list[int]:
        """Which layers have experts: every nth, or a 0 or a 1 for each layer."""
        return self.fields.get("moe_layer_freq") or 1

    @property
    def expert_width(self) -> int:
        """Features inside an expert."""
        return self._number("moe_ffn_hidden_size") or self.ffn

    @property
    def shared_width(self) -> int:
        """Features inside the shared experts."""
        return self._number("moe_shared_expert_intermediate_size")

    @property
    def expert_latent(self) -> int:
        """Features that experts see, if not the hidden ones."""
        return self._number("moe_latent_size")

    @property
    def latent(self) -> bool:
        """Whether keys and values come from a latent vector, which every rank of tp has whole."""
        return bool(self.fields.get("multi_latent_attention"))

    @property
    def query_latent(self) -> int:
        """Features of a query's latent."""
        return self._number("q_lora_rank")

    @property
    def key_latent(self) -> int:
        """Features of the latent of keys and values."""
        return self._number("kv_lora_rank")

    @property
    def key_width(self) -> int:
        """Features of a key of latent attention, without those that positions turn."""
        return self._number("qk_head_dim")

    @property
    def turned_key(self) -> int:
        """Features of the key that all heads of latent attention share, which positions turn."""
        return self._number("qk_pos_emb_head_dim")

    @property
    def value_width(self) -> int:
        """Features of a value of latent attention."""
        return self._number("v_head_dim")

    @property
    def mamba_heads(self) -> int:
        """Heads of a Mamba layer."""
        return self._number("mamba_num_heads")

    @property
    def mamba_width(self) -> int:
        """Features of a head of a Mamba layer."""
        return self._number("mamba_head_dim")

    @property
    def mamba_groups(self) -> int:
        """Groups of a Mamba layer, each with a B and a C."""
        return self._number("mamba_num_groups")

    @property
    def mamba_state(self) -> int:
        """Features of a group's B, and of its C."""
        return self._number("mamba_state_dim")

    @property
    def depths(self) -> int:
        """Depths of multi-token prediction."""
        return self._number("mtp_num_layers")

    @property
    def biased(self) -> bool:
        """Whether linear layers have biases."""
        return bool(self.fields.get("add_bias_linear"))

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys have norms."""
        return bool(self.fields.get("qk_layernorm"))

    @property
    def tied(self) -> bool:
        """Whether the output layer has the embedding's weight."""
        return bool(self.fields.get("share_embeddings_and_output_weights"))
