"""GPT-OSS: windows and whole attention in turns, sinks, experts in one tensor a layer, gate and up row by row."""

from collections.abc import Iterator, Mapping
from typing import Any

from tp_invariant_recipes.sources.hf_family import FIELDS, SHARED, Family

SIZES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("rms_norm_eps", "rope_theta", "num_experts_per_tok"),
)
# What Bridge's GPTOSSBridge sets whatever config.json says, and the defaults of its provider.
OWN: dict[str, tuple[Any, Any]] = {
    "add_bias_linear": (True, True),
    "add_qkv_bias": (False, False),
    "share_embeddings_and_output_weights": (False, True),
    "activation_func": ("megatron.core.fusions.fused_bias_geglu.quick_gelu", None),
    "activation_func_clamp_value": (7.0, None),
    "glu_linear_offset": (1.0, 0.0),
    "softmax_type": ("learnable", "vanilla"),
    "window_attn_skip_freq": (2, None),
    "position_embedding_type": ("yarn", "learned_absolute"),
    "yarn_original_max_position_embeddings": (4096, None),
    "yarn_beta_fast": (32.0, None),
    "yarn_beta_slow": (1.0, None),
    "yarn_correction_range_round_to_int": (False, None),
    "moe_router_pre_softmax": (False, False),
    "qk_layernorm": (False, False),
}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}
KINDS = ("sliding_attention", "full_attention")  # of layers, in turns


class GptOss(Family):
    """The one architecture with sinks. The sizes of a window and of its factor count beside those of all."""

    @property
    def fields(self) -> Mapping[str, tuple[str, Any]]:
        """As of Family."""
        return {key: FIELDS[key] for key in SIZES} | {
            "rope_factor": ("yarn_rotary_scaling_factor", None),
            "num_local_experts": ("num_moe_experts", None),
            "intermediate_size": ("moe_ffn_hidden_size", None),
            "sliding_window": ("window_size", None),
        }

    @property
    def shared(self) -> Mapping[str, tuple[Any, Any]]:
        """As of Family."""
        return {name: value for name, value in SHARED.items() if name != "window_size"} | OWN

    @property
    def fixed(self) -> Mapping[str, Any]:
        """As of Family."""
        return {"hidden_act": "silu", "attention_bias": True, "tie_word_embeddings": False}

    def sizes(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """As of Family."""
        sizes = self._heads(model)
        sizes["intermediate_size"] = sizes["intermediate_size"] or model.get("ffn_hidden_size")
        sizes["sliding_window"] = model["window_size"][0] + 1 if model.get("window_size") else None
        return sizes

    def rope(self, rope: Mapping[str, Any]) -> float | None:
        """As of Family."""
        if rope.get("rope_type") != "yarn" or any(rope.get(key) != value for key, value in YARN.items()):
            raise ValueError(f"Bridge sets no rotary frequencies by {dict(rope)}")
        return float(rope["factor"])

    def config(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """As of Family."""
        sizes = self.sizes(model)
        rope = {"rope_theta": sizes.pop("rope_theta"), "rope_type": "yarn", "factor": sizes.pop("rope_factor"), **YARN}
        return {
            **sizes,
            **self.fixed,
            "attention_dropout": 0.0,
            "layer_types": [KINDS[number % 2] for number in range(sizes["num_hidden_layers"])],
            "max_position_embeddings": max(model["seq_length"], 131072),
            "rope_parameters": rope,
        }

    def tensors(self, sizes: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """As of Family."""
        hidden, experts, size = sizes["hidden_size"], sizes["num_local_experts"], sizes["intermediate_size"]
        plain = Family(self.architecture, "", qkv_bias=True).tensors({**sizes, "tie_word_embeddings": False})
        yield from ((name, shape) for name, shape in plain if ".mlp." not in name)
        for number in range(sizes["num_hidden_layers"]):
            layer = f"model.layers.{number}"
            yield f"{layer}.self_attn.o_proj.bias", (hidden,)
            yield f"{layer}.self_attn.sinks", (sizes["num_attention_heads"],)
            yield f"{layer}.mlp.router.weight", (experts, hidden)
            yield f"{layer}.mlp.router.bias", (experts,)
            yield f"{layer}.mlp.experts.gate_up_proj", (experts, hidden, 2 * size)
            yield f"{layer}.mlp.experts.gate_up_proj_bias", (experts, 2 * size)
            yield f"{layer}.mlp.experts.down_proj", (experts, size, hidden)
            yield f"{layer}.mlp.experts.down_proj_bias", (experts, hidden)


GPT_OSS = GptOss("GptOssForCausalLM", "gpt_oss", experts=True)
