# SPDX-License-Identifier: Apache-2.0
"""The architectures of Hugging Face that weights come from and go to: a row of FAMILIES each, and their own classes.

What is not in a family's row or class, no other file knows of it: `hf_models` compares any folder with any model.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.sources.hf_family import FIELDS, PUBLISHED_LENGTH, Family

WINDOW, WHOLE, LINEAR = "sliding_attention", "full_attention", "linear_attention"  # kinds of layers


def _head(model: Mapping[str, Any]) -> int:
    return model.get("kv_channels") or model["hidden_size"] // model["num_attention_heads"]


# --- OLMoE ---


class Olmoe(Family):
    """One norm has the queries of all heads, and one the keys."""

    def refused(self, model: Mapping[str, Any]) -> str | None:
        """As of Family."""
        if _head(model) * model["num_attention_heads"] == model["hidden_size"]:
            return None
        return f"{self.architecture} has heads of hidden_size / num_attention_heads; model.kv_channels={_head(model)}"


# --- Gemma 3 ---


class Gemma3(Family):
    """Five layers with windows and angles of their own, then one without."""

    def of_model(self, key: str, sizes: Mapping[str, Any]) -> Any:
        """As of Family. Bridge's class has the window as Hugging Face counts it."""
        return sizes[key] ** -0.5 if key == "query_pre_attn_scalar" else sizes[key]

    def sizes(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """As of Family."""
        scalar = round((model.get("softmax_scale") or 1 / 16) ** -2, 6)
        sizes = super().sizes(model) | {"query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar}
        return sizes | {"rope_theta": [*sizes["rope_theta"]]}

    def rotary(self, rope: Mapping[str, Any]) -> dict[str, Any]:
        """As of Family: the bases of layers with windows, and of the others."""
        local, others = rope[WINDOW], rope[WHOLE]
        for parameters in (local, others):
            self.rope(parameters)
        return {"rope_theta": [local["rope_theta"], others["rope_theta"]], "rope_factor": None}

    def rope_parameters(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """As of Family."""
        bases = zip((WINDOW, WHOLE), sizes["rope_theta"], strict=True)
        return {kind: {"rope_theta": base, "rope_type": "default"} for kind, base in bases}


# --- GPT-OSS ---

# What Bridge's GPTOSSBridge sets whatever config.json says, and the defaults of its provider.
_OSS: dict[str, tuple[Any, Any]] = {
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
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}


class GptOss(Family):
    """Windows and whole attention in turns, sinks, experts in one tensor a layer, gate and up row by row."""

    def has(self, model: Mapping[str, Any]) -> bool:
        """As of Family."""
        return model.get("softmax_type") == "learnable"

    def sizes(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """As of Family."""
        sizes = self._heads(model)
        sizes["intermediate_size"] = sizes["intermediate_size"] or model.get("ffn_hidden_size")
        sizes["sliding_window"] = model["window_size"][0] + 1 if model.get("window_size") else None
        return sizes

    def rope(self, rope: Mapping[str, Any]) -> float | None:
        """As of Family."""
        if rope.get("rope_type") != "yarn" or any(rope.get(key) != value for key, value in _YARN.items()):
            raise ValueError(f"Bridge sets no rotary frequencies by {dict(rope)}")
        return float(rope["factor"])

    def rope_parameters(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """As of Family."""
        return {"rope_theta": sizes["rope_theta"], "rope_type": "yarn", "factor": sizes["rope_factor"], **_YARN}

    def tensors(self, sizes: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """As of Family."""
        hidden, experts, size = sizes["hidden_size"], sizes["num_local_experts"], sizes["intermediate_size"]
        plain = Family(self.architecture, qkv_bias=True).tensors({**sizes, "tie_word_embeddings": False})
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


# --- GLM-4.5 ---

# What Bridge's GLM45Bridge sets whatever config.json says, and the defaults of its provider.
_GLM: dict[str, tuple[Any, Any]] = {
    "share_embeddings_and_output_weights": (False, True),
    "rotary_percent": (0.5, 1.0),
    "moe_router_score_function": ("sigmoid", "softmax"),
    "moe_router_enable_expert_bias": (True, False),
    "moe_router_pre_softmax": (False, False),
    "moe_router_dtype": ("fp32", None),
    "moe_router_num_groups": (None, None),
}
BIAS = "mlp.gate.e_score_correction_bias"  # fp32 in every checkpoint: it is no weight
DEPTHS = "num_nextn_predict_layers"


class Glm45(Family):
    """Dense layers first, then experts with a shared one. Hugging Face stores MTP as one more layer,
    which its own class skips.
    """

    def has(self, model: Mapping[str, Any]) -> bool:
        """As of Family."""
        sigmoid = model.get("moe_router_score_function") == "sigmoid" and not model.get("multi_latent_attention")
        return bool(model.get("num_moe_experts") and sigmoid)

    def refused(self, model: Mapping[str, Any]) -> str | None:
        """As of Family: what of its experts config.json has no place for."""
        if dense_first(model.get("moe_layer_freq"), model["num_layers"]) is None:
            return f"{self.architecture} has its dense layers first; model.moe_layer_freq"
        shared, routed = model.get("moe_shared_expert_intermediate_size"), model.get("moe_ffn_hidden_size")
        if shared == routed:
            return None
        key = "model.moe_shared_expert_intermediate_size"
        return f"{self.architecture} has a shared expert of the others' size; {key}={routed}"

    @property
    def shared(self) -> Mapping[str, tuple[Any, Any]]:
        """As of Family. The shared expert has the size of the others."""
        return {n: value for n, value in super().shared.items() if n != "moe_shared_expert_intermediate_size"}

    def of_model(self, key: str, sizes: Mapping[str, Any]) -> Any:
        """As of Family."""
        if key == "first_k_dense_replace":
            dense = sizes[key]
            return [0] * dense + [1] * (sizes["num_hidden_layers"] - dense)
        return sizes[key] or None if key == DEPTHS else sizes[key]

    def sizes(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """As of Family. Raises ValueError: dense layers stand elsewhere than first."""
        sizes = self._heads(model)
        sizes["moe_intermediate_size"] = sizes["moe_intermediate_size"] or sizes["intermediate_size"]
        sizes["first_k_dense_replace"] = dense_first(sizes["first_k_dense_replace"], sizes["num_hidden_layers"])
        sizes["routed_scaling_factor"] = float(sizes["routed_scaling_factor"] or 1.0)
        sizes |= {key: bool(sizes[key]) for key in ("use_qk_norm", "attention_bias")}
        return sizes | {"rope_factor": None, DEPTHS: sizes[DEPTHS] or 0}

    def tensors(self, sizes: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """As of Family."""
        hidden, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
        every = {**sizes, "tie_word_embeddings": False, "num_hidden_layers": layers + sizes[DEPTHS]}
        plain = Family(self.architecture, qkv_bias=bool(sizes["attention_bias"]), qk_norm=bool(sizes["use_qk_norm"]))
        for name, shape in plain.tensors(every):
            layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
            if ".mlp." not in name or layer < sizes["first_k_dense_replace"]:
                yield name, shape
        experts = {**sizes, "num_experts": sizes["n_routed_experts"]}
        for layer in range(sizes["first_k_dense_replace"], layers + sizes[DEPTHS]):
            yield from self._mlp(f"model.layers.{layer}.mlp", experts)
            yield f"model.layers.{layer}.{BIAS}", (sizes["n_routed_experts"],)
            own = {**sizes, "intermediate_size": sizes["moe_intermediate_size"]}
            yield from plain._mlp(f"model.layers.{layer}.mlp.shared_experts", own)
        for layer in range(layers, layers + sizes[DEPTHS]):
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                yield f"model.layers.{layer}.{norm}.weight", (hidden,)
            yield f"model.layers.{layer}.eh_proj.weight", (hidden, 2 * hidden)

    def spare(self, name: str, sizes: Mapping[str, Any]) -> bool:
        """As of Family: copies of the embedding and the output layer in the layer of MTP."""
        last = f"model.layers.{sizes['num_hidden_layers'] + sizes[DEPTHS] - 1}."
        copies = (f"{last}embed_tokens.weight", f"{last}shared_head.head.weight")
        return (sizes[DEPTHS] > 0 and name in copies) or super().spare(name, sizes)


def dense_first(frequency: Any, layers: int) -> int | None:
    """How many layers are dense, all of them before those of experts; None: the layers come in another order."""
    if not isinstance(frequency, list | tuple):
        return 0 if (frequency or 1) == 1 else None
    dense = frequency.index(1) if 1 in frequency else layers
    return dense if [*frequency] == [0] * dense + [1] * (layers - dense) else None


# --- Qwen3-Next ---

_KINDS = (WHOLE, LINEAR)
_DELTA = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_ROTARY, _LAYERS, _SHARED = "partial_rotary_factor", "layer_types", "shared_expert_intermediate_size"


class Qwen3Next(Family):
    """Gated delta nets among layers of attention, gates, experts with a shared one. Which layers these are is a size.

    Published folders also hold MTP (`mtp.`), which neither transformers nor tpi reads.
    """

    def has(self, model: Mapping[str, Any]) -> bool:
        """As of Family."""
        return bool(families.delta_sizes(model) and model.get("num_moe_experts"))

    def of_model(self, key: str, sizes: Mapping[str, Any]) -> Any:
        """As of Family."""
        return [_KINDS.index(kind) for kind in sizes[key]] if key == _LAYERS else super().of_model(key, sizes)

    def sizes(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """As of Family."""
        sizes, every = super().sizes(model), model["linear_attention_freq"]
        layers = every if isinstance(every, list) else [(n + 1) % every != 0 for n in range(model["num_layers"])]
        return sizes | {_LAYERS: [_KINDS[bool(linear)] for linear in layers]}

    def rope_parameters(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """As of Family."""
        return super().rope_parameters(sizes) | {_ROTARY: sizes[_ROTARY]}

    def tensors(self, sizes: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """As of Family."""
        hidden, linear = sizes["hidden_size"], [_KINDS.index(kind) for kind in sizes[_LAYERS]]
        for name, shape in super().tensors(sizes):
            layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
            if ".self_attn." not in name:
                yield name, shape
            elif layer is not None and not linear[layer]:
                yield name, (2 * shape[0], hidden) if name.endswith("q_proj.weight") else shape  # with its gate
        heads, width = sizes["linear_num_value_heads"], sizes["linear_value_head_dim"]
        keys, values = sizes["linear_num_key_heads"] * sizes["linear_key_head_dim"], heads * width
        own = {"intermediate_size": sizes[_SHARED], "hidden_size": hidden}
        plain = Family(self.architecture)
        for layer, net in enumerate(linear):
            mlp, delta = f"model.layers.{layer}.mlp", f"model.layers.{layer}.linear_attn"
            yield from plain._mlp(f"{mlp}.shared_expert", own)
            yield f"{mlp}.shared_expert_gate.weight", (1, hidden)
            if net:
                yield f"{delta}.in_proj_qkvz.weight", (2 * (keys + values), hidden)
                yield f"{delta}.in_proj_ba.weight", (2 * heads, hidden)
                yield f"{delta}.conv1d.weight", (2 * keys + values, 1, sizes["linear_conv_kernel_dim"])
                yield f"{delta}.A_log", (heads,)
                yield f"{delta}.dt_bias", (heads,)
                yield f"{delta}.norm.weight", (width,)
                yield f"{delta}.out_proj.weight", (hidden, values)

    def spare(self, name: str, sizes: Mapping[str, Any]) -> bool:
        """As of Family."""
        return name.startswith("mtp.") or super().spare(name, sizes)


_GELU = "megatron.core.activations.fast_gelu"
GLM_45 = Glm45(
    *("Glm4MoeForCausalLM", "glm4_moe", "glm", "glm45_toy"),
    experts=True,
    partial=0.5,
    length=PUBLISHED_LENGTH,
    optional=("first_k_dense_replace", DEPTHS),
    lacks=("norm_topk_prob", "num_experts", "tie_word_embeddings"),
    more={
        "intermediate_size": FIELDS["intermediate_size"],
        "n_routed_experts": ("num_moe_experts", None),
        "routed_scaling_factor": ("moe_router_topk_scaling_factor", None),
        "first_k_dense_replace": ("moe_layer_freq", None),
        "use_qk_norm": ("qk_layernorm", False),
        "attention_bias": ("add_qkv_bias", False),
        DEPTHS: ("mtp_num_layers", None),
    },
    own=_GLM,
    stated={"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "tie_word_embeddings": False},
)
# The first that has a model's layers is the model's. Those of PLAIN have layers of Bridge's GPT models without a
# specification of their own, told apart by three traits; they are in no order.
PLAIN = (
    Family("LlamaForCausalLM", "llama", "llama", "llama32_toy"),
    Family("Qwen2ForCausalLM", "qwen2", "qwen", "qwen25_toy", qkv_bias=True),
    Family("Qwen3ForCausalLM", "qwen3", "qwen", "qwen3_toy", qk_norm=True),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", "qwen", "qwen3_moe_toy", qk_norm=True, experts=True),
)
FAMILIES: tuple[Family, ...] = (
    Olmoe(*("OlmoeForCausalLM", "olmoe", "olmoe", "olmoe_toy"), qk_norm=True, experts=True, norm_of_all_heads=True,
        layers=families.OF_ALL_HEADS,
        expert_size="intermediate_size",
        own={"share_embeddings_and_output_weights": (False, True), "qk_layernorm": (True, False)},
        stated={"clip_qkv": None}),
    Gemma3(
        *("Gemma3ForCausalLM", "gemma3_text", "gemma", "gemma3_1b"),  # a toy has other windows than any folder
        qk_norm=True,
        layers=families.TWO_BASES,
        kinds=(*[WINDOW] * 5, WHOLE),
        norms=(
            *("input_layernorm", "post_attention_layernorm"),
            *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ),
        more={
            "rms_norm_eps": ("layernorm_epsilon", 1e-6),
            "rope_theta": ("rotary_base", (10000, 1000000)),
            "sliding_window": ("window_size", 512),
            "query_pre_attn_scalar": ("softmax_scale", 1 / 16),
        },
        own={
            "share_embeddings_and_output_weights": (True, True),
            "layernorm_zero_centered_gamma": (True, True),
            "activation_func": (_GELU, _GELU),
            "normalization": ("RMSNorm", "RMSNorm"),
            "gated_linear_unit": (True, True),
            "add_bias_linear": (False, False),
            "position_embedding_type": ("rope", "rope"),
            "qk_layernorm": (True, True),
            "interleaved_attn_pattern": ((5, 1), (5, 1)),
        },
        stated={
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    Qwen3Next(
        *("Qwen3NextForCausalLM", "qwen3_next", "qwen", "qwen3_next_toy"),
        qk_norm=True,
        experts=True,
        without=("model.mtp_num_layers=null",),
        partial=None,
        more={
            _SHARED: ("moe_shared_expert_intermediate_size", None),
            _ROTARY: ("rotary_percent", 1.0),
            _LAYERS: ("linear_attention_freq", None),
            **{name: (name, default) for name, default in _DELTA.items()},
        },
        own={
            "qk_layernorm": (True, False),
            "layernorm_zero_centered_gamma": (True, False),
            "attention_output_gate": (True, False),
            "moe_shared_expert_gate": (True, False),
            "experimental_attention_variant": ("gated_delta_net", None),
        },
    ),
    GptOss(
        *("GptOssForCausalLM", "gpt_oss", "gpt_oss", "gpt_oss_toy"),
        experts=True,
        kinds=(WINDOW, WHOLE),
        expert_size="intermediate_size",
        lacks=("norm_topk_prob", "num_experts", "tie_word_embeddings"),
        more={
            "rope_factor": ("yarn_rotary_scaling_factor", None),
            "num_local_experts": ("num_moe_experts", None),
            "sliding_window": ("window_size", None),
        },
        own=_OSS,
        stated={"attention_bias": True, "tie_word_embeddings": False},
    ),
    GLM_45,
    *PLAIN,
)  # fmt: skip
NAMES = ", ".join(family.architecture for family in (*PLAIN, *FAMILIES[: -len(PLAIN)]))
