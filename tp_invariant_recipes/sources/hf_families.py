"""Architectures whose layers numerics/megatron/families names: norms in other places, windows, capped scores."""

from collections.abc import Mapping
from typing import Any

from tp_invariant_recipes.sources.hf_family import Family

TIED = {"share_embeddings_and_output_weights": (True, True)}
WINDOW, WHOLE = "sliding_attention", "full_attention"  # kinds of layers
_GELU = "megatron.core.activations.fast_gelu"
_GEMMA = {
    **TIED,
    "layernorm_zero_centered_gamma": (True, True),
    "activation_func": (_GELU, _GELU),
    "normalization": ("RMSNorm", "RMSNorm"),
    "gated_linear_unit": (True, True),
    "add_bias_linear": (False, False),
    "position_embedding_type": ("rope", "rope"),
}
_NORMS = (*("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),)


class Exaone4(Family):
    """All layers have whole attention; Bridge has no other EXAONE 4."""

    def layer_types(self, sizes: Mapping[str, Any]) -> list[str]:
        """As of Family."""
        return [WHOLE] * sizes["num_hidden_layers"]


class Gemma2(Family):
    """Windows in every other layer."""

    def sizes(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """As of Family."""
        window = model.get("window_size")
        return super().sizes(model) | {"sliding_window": window[0] + 1 if window else None}

    def layer_types(self, sizes: Mapping[str, Any]) -> list[str]:
        """As of Family."""
        return [(WINDOW, WHOLE)[number % 2] for number in range(sizes["num_hidden_layers"])]


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

    def layer_types(self, sizes: Mapping[str, Any]) -> list[str]:
        """As of Family."""
        return [WHOLE if number % 6 == 5 else WINDOW for number in range(sizes["num_hidden_layers"])]

    def rotary(self, rope: Mapping[str, Any]) -> dict[str, Any]:
        """As of Family: the bases of layers with windows, and of the others."""
        local, others = rope[WINDOW], rope[WHOLE]
        for parameters in (local, others):
            self.rope(parameters)
        return {"rope_theta": [local["rope_theta"], others["rope_theta"]], "rope_factor": None}

    def config(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """As of Family."""
        settings = super().config(model)
        bases = zip((WINDOW, WHOLE), settings["rope_parameters"]["rope_theta"], strict=True)
        rope = {kind: {"rope_theta": base, "rope_type": "default"} for kind, base in bases}
        return settings | {"rope_parameters": rope}


# As families.FAMILIES names them.
FAMILIES: dict[str, Family] = {
    "OLMoE": Family(
        "OlmoeForCausalLM",
        "olmoe",
        qk_norm=True,
        experts=True,
        norm_of_all_heads=True,
        expert_size="intermediate_size",
        own={"share_embeddings_and_output_weights": (False, True), "qk_layernorm": (True, False)},
        stated={"clip_qkv": None},
    ),
    "EXAONE 4": Exaone4(
        "Exaone4ForCausalLM",
        "exaone4",
        qk_norm=True,
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        own=TIED | {"qk_layernorm": (True, False)},
        stated={"sliding_window": None},
    ),
    "Gemma 2": Gemma2(
        "Gemma2ForCausalLM",
        "gemma2",
        norms=_NORMS,
        more={
            "rms_norm_eps": ("layernorm_epsilon", 1e-6),
            "sliding_window": ("window_size", (4095, 0)),
            "query_pre_attn_scalar": ("query_pre_attn_scalar", 224),
            "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", 30.0),
        },
        own=_GEMMA,
        stated={"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "Gemma 3": Gemma3(
        "Gemma3ForCausalLM",
        "gemma3_text",
        qk_norm=True,
        norms=_NORMS,
        more={
            "rms_norm_eps": ("layernorm_epsilon", 1e-6),
            "rope_theta": ("rotary_base", (10000, 1000000)),
            "sliding_window": ("window_size", 512),
            "query_pre_attn_scalar": ("softmax_scale", 1 / 16),
        },
        own=_GEMMA | {"qk_layernorm": (True, True), "interleaved_attn_pattern": ((5, 1), (5, 1))},
        stated={
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
}
