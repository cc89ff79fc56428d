# SPDX-License-Identifier: Apache-2.0
"""An architecture of Hugging Face: its sizes in config.json, what else it must have, its tensors' names and shapes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tp_invariant_recipes.numerics.megatron import families

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
# In config.json -> the field of the model, and the default of Bridge's GPTModelProvider.
FIELDS: dict[str, tuple[str, Any]] = {
    "num_hidden_layers": ("num_layers", None),
    "hidden_size": ("hidden_size", None),
    "intermediate_size": ("ffn_hidden_size", None),
    "num_attention_heads": ("num_attention_heads", None),
    "num_key_value_heads": ("num_query_groups", None),
    "head_dim": ("kv_channels", None),
    "vocab_size": ("vocab_size", None),
    "tie_word_embeddings": ("share_embeddings_and_output_weights", True),
    "rms_norm_eps": ("layernorm_epsilon", 1e-5),
    "rope_theta": ("rotary_base", 10000),
    "rope_factor": ("rope_scaling_factor", 1.0),
    "num_experts": ("num_moe_experts", None),
    "num_experts_per_tok": ("moe_router_topk", 2),
    "moe_intermediate_size": ("moe_ffn_hidden_size", None),
    "norm_topk_prob": ("moe_router_pre_softmax", False),
}
EXPERTS_ONLY = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
DENSE_ONLY = ("intermediate_size",)

# What all families have: the field of the model, the value that it must have, and the default of the provider.
SHARED: dict[str, tuple[Any, Any]] = {
    "normalization": ("RMSNorm", "LayerNorm"),
    "layernorm_zero_centered_gamma": (False, False),
    "gated_linear_unit": (True, False),
    "activation_func": ("torch.nn.functional.silu", None),
    "add_bias_linear": (False, True),
    "position_embedding_type": ("rope", "learned_absolute"),
    "rotary_percent": (1.0, 1.0),
    "rotary_interleaved": (False, False),
    "seq_len_interpolation_factor": (None, None),
    "multi_latent_attention": (False, False),
    "qk_l2_norm": (False, False),
    "attention_output_gate": (False, False),
    "experimental_attention_variant": (None, None),
    "moe_shared_expert_gate": (False, False),
    "softmax_type": ("vanilla", "vanilla"),
    "window_size": (None, None),
    "mtp_num_layers": (None, None),
    "moe_layer_freq": (1, 1),
    "moe_shared_expert_intermediate_size": (None, None),
    "moe_router_enable_expert_bias": (False, False),
    "moe_router_score_function": ("softmax", "softmax"),
    "should_pad_vocab": (False, False),
    "no_rope_freq": (None, None),
    "softmax_scale": (None, None),
    "activation_func_clamp_value": (None, None),
    "glu_linear_offset": (0.0, 0.0),
    "moe_latent_size": (None, None),
    "moe_router_topk_scaling_factor": (None, None),
    "moe_router_group_topk": (None, None),
}
# The same of config.json, where an architecture has the field.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Megatron-Core's constants of scaled frequencies (RotaryEmbedding._apply_scaling).
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
PUBLISHED_LENGTH = 131072  # tokens; what models with scaled frequencies, and GLM-4.5, are published for


@dataclass(frozen=True)
class Family:
    """One architecture.

    model_type:  in config.json. package: Bridge's, which registers its conversion.
    like:        a model of conf/model/ that has all that the family shares; the sizes are a folder's own.
    without:     overrides that take from such a model what no folder has.
    qkv_bias, qk_norm, experts: parts of its layers.
    norms:       of a layer. norm_of_all_heads: whether one norm has the queries of all heads, and one the keys.
    expert_size: the key of an expert's features in config.json.
    partial:     the part of a head's features that rotary positions turn; None: a size says it.
    more:        fields that others lack, or other defaults. lacks: keys of FIELDS that it has not.
    own:         what `shared` has otherwise. stated: as `fixed`.
    optional:    sizes that are 0 where config.json lacks them.
    layers:      the row of numerics/megatron/families that its models have; empty: `has` tells them by other traits.
    kinds:       of layers, in turns, as `layer_types` has them; none: config.json does not list them.
    length:      tokens that its models are published for; 0: those of a run.
    """

    architecture: str
    model_type: str = ""
    package: str = ""
    like: str = ""
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_of_all_heads: bool = False
    expert_size: str = "moe_intermediate_size"
    more: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    own: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    stated: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    partial: float | None = 1.0
    optional: tuple[str, ...] = ()
    layers: str = ""
    kinds: tuple[str, ...] = ()
    length: int = 0

    def has(self, model: Mapping[str, Any]) -> bool:
        """Whether a model, a section `model` of a tree, has its layers."""
        if self.layers:
            return families.family_of(model) == self.layers
        traits = (bool(model.get("add_qkv_bias")), bool(model.get("qk_layernorm")), bool(model.get("num_moe_experts")))
        return traits == (self.qkv_bias, self.qk_norm, self.experts)

    def refused(self, model: Mapping[str, Any]) -> str | None:
        """Return what its config.json cannot say of a model with its layers; None: nothing."""
        return None

    @property
    def fields(self) -> Mapping[str, tuple[str, Any]]:
        """Sizes in config.json -> field of the model, and the default of Bridge's provider."""
        omitted = (*self.lacks, *(DENSE_ONLY if self.experts else EXPERTS_ONLY))
        fields = {key: field for key, field in FIELDS.items() if key not in omitted}
        if self.experts:
            fields[self.expert_size] = fields.pop("moe_intermediate_size")
        return fields | {**self.more}

    @property
    def shared(self) -> Mapping[str, tuple[Any, Any]]:
        """Field of the model -> the value that it must have, and the default of the provider."""
        sizes = {name for name, _ in self.fields.values()}
        return {name: value for name, value in SHARED.items() if name not in sizes} | {**self.own}

    @property
    def fixed(self) -> Mapping[str, Any]:
        """Key of config.json -> the value that it must have, where the architecture has the key."""
        return {key: value for key, value in FIXED.items() if key not in self.fields} | {**self.stated}

    def layer_types(self, sizes: Mapping[str, Any]) -> list[str] | None:
        """`layer_types` of config.json; None: the architecture has none."""
        kinds = self.kinds
        return [kinds[number % len(kinds)] for number in range(sizes["num_hidden_layers"])] if kinds else None

    def of_model(self, key: str, sizes: Mapping[str, Any]) -> Any:
        """Return a size as the field of the model has it.

        A window of Megatron's counts the positions before a token, which Hugging Face's has in it.
        """
        value = sizes[key]
        if key == "sliding_window":
            return [value - 1, 0]
        return not value if key == "norm_topk_prob" else value

    def sizes(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sizes of a model, a section `model` of a tree."""
        sizes = self._heads(model)
        if self.experts:
            sizes["norm_topk_prob"] = not sizes["norm_topk_prob"]
            sizes[self.expert_size] = sizes[self.expert_size] or model.get("ffn_hidden_size")
        else:
            sizes["intermediate_size"] = sizes["intermediate_size"] or 4 * sizes["hidden_size"]
        if not model.get("rope_scaling"):
            sizes["rope_factor"] = None
        return sizes

    def _heads(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sizes as the model has them, and those of heads that it leaves to Megatron-Core."""
        sizes = {key: model.get(name, default) for key, (name, default) in self.fields.items()}
        heads = sizes["num_attention_heads"]
        sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or heads
        sizes["head_dim"] = sizes["head_dim"] or sizes["hidden_size"] // heads
        return sizes

    def absent(self, key: str) -> tuple[Any, ...]:
        """Return what a key stands for where config.json lacks it, and a size that may be 0: (0,).

        Empty: it is needed.
        """
        return (0,) if key in self.optional else ()

    def spare(self, name: str, sizes: Mapping[str, Any]) -> bool:
        """Whether published folders have a tensor that Bridge does not read: Llama 2's have rotary frequencies."""
        return ".rotary_emb." in name

    def rotary(self, rope: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sizes in rope_parameters of config.json. Raises ValueError as `rope`, and KeyError."""
        return {"rope_theta": rope["rope_theta"], "rope_factor": self.rope(rope)}

    def rope(self, rope: Mapping[str, Any]) -> float | None:
        """Return the factor in rope_parameters of config.json.

        Raises ValueError: Megatron-Core has other frequencies.
        """
        kind = rope.get("rope_type", "default")
        if kind == "llama3" and all(rope.get(key) == value for key, value in LLAMA3_ROPE.items()):
            return float(rope["factor"])
        if kind != "default" or (self.partial and rope.get("partial_rotary_factor", self.partial) != self.partial):
            raise ValueError(f"Megatron-Core scales no rotary frequencies by {dict(rope)}")
        return None

    def rope_parameters(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """Return rope_parameters of config.json, from which `rotary` reads these sizes."""
        theta, factor = sizes["rope_theta"], sizes["rope_factor"]
        if factor is not None:
            return {"rope_theta": theta, "rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}
        partial = {} if self.partial in (None, 1.0) else {"partial_rotary_factor": self.partial}
        return {"rope_theta": theta, "rope_type": "default", **partial}

    def config(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Return what config.json of a model holds beside the names of the architecture and the dtype."""
        sizes = self.sizes(model)
        rope = self.rope_parameters(sizes)
        del sizes["rope_theta"]
        length = PUBLISHED_LENGTH if sizes.pop("rope_factor") else self.length
        fixed = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
        if "num_experts" in sizes:
            fixed |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
        kinds = self.layer_types(sizes)
        return {
            **fixed,
            **sizes,
            **self.stated,
            **({} if kinds is None else {"layer_types": kinds}),
            "max_position_embeddings": max(model["seq_length"], length),
            "rope_parameters": rope,
        }

    def tensors(self, sizes: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor. sizes: keys of FIELDS."""
        hidden, vocabulary, head = (int(sizes[key]) for key in ("hidden_size", "vocab_size", "head_dim"))
        yield "model.embed_tokens.weight", (vocabulary, hidden)
        yield "model.norm.weight", (hidden,)
        if not sizes["tie_word_embeddings"]:
            yield OUTPUT, (vocabulary, hidden)
        rows = {"q": sizes["num_attention_heads"] * head, **dict.fromkeys("kv", sizes["num_key_value_heads"] * head)}
        for number in range(sizes["num_hidden_layers"]):
            layer = f"model.layers.{number}"
            for norm in self.norms:
                yield f"{layer}.{norm}.weight", (hidden,)
            for part, size in rows.items():
                yield f"{layer}.self_attn.{part}_proj.weight", (size, hidden)
                if self.qkv_bias:
                    yield f"{layer}.self_attn.{part}_proj.bias", (size,)
            yield f"{layer}.self_attn.o_proj.weight", (hidden, rows["q"])
            for part in "qk" if self.qk_norm else "":
                yield f"{layer}.self_attn.{part}_norm.weight", (rows[part] if self.norm_of_all_heads else head,)
            yield from self._mlp(f"{layer}.mlp", sizes)

    def _mlp(self, mlp: str, sizes: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, size = sizes["hidden_size"], sizes[self.expert_size if self.experts else "intermediate_size"]
        names = [f"{mlp}.experts.{n}" for n in range(sizes["num_experts"])] if self.experts else [mlp]
        if self.experts:
            yield f"{mlp}.gate.weight", (sizes["num_experts"], hidden)
        for name in names:
            yield f"{name}.gate_proj.weight", (size, hidden)
            yield f"{name}.up_proj.weight", (size, hidden)
            yield f"{name}.down_proj.weight", (hidden, size)
