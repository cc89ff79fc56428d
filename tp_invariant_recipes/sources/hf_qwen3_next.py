"""Qwen3-Next: gated delta nets among layers of attention, gates, and experts with a shared one.

Published folders also hold multi-token prediction (`mtp.`), which neither transformers nor tpi reads.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tp_invariant_recipes.sources.hf_family import Family

KINDS = ("full_attention", "linear_attention")  # of layers
_DELTA = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_ROTARY, _LAYERS, _SHARED = "partial_rotary_factor", "layer_types", "shared_expert_intermediate_size"


class Qwen3Next(Family):
    """The one architecture with gated delta nets. Which layers these are is a size of its own."""

    def of_model(self, key: str, sizes: Mapping[str, Any]) -> Any:
        """As of Family."""
        return [KINDS.index(kind) for kind in sizes[key]] if key == _LAYERS else super().of_model(key, sizes)

    def sizes(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """As of Family."""
        sizes, every = super().sizes(model), model["linear_attention_freq"]
        layers = every if isinstance(every, list) else [(n + 1) % every != 0 for n in range(model["num_layers"])]
        return sizes | {_LAYERS: [KINDS[bool(linear)] for linear in layers]}

    def config(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """As of Family."""
        settings = super().config(model)
        return settings | {"rope_parameters": settings["rope_parameters"] | {_ROTARY: settings[_ROTARY]}}

    def tensors(self, sizes: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """As of Family."""
        hidden, linear = sizes["hidden_size"], [KINDS.index(kind) for kind in sizes[_LAYERS]]
        for name, shape in super().tensors(sizes):
            layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
            if ".self_attn." not in name:
                yield name, shape
            elif layer is not None and not linear[layer]:
                yield name, (2 * shape[0], hidden) if name.endswith("q_proj.weight") else shape  # with its gate
        heads, width = sizes["linear_num_value_heads"], sizes["linear_value_head_dim"]
        keys, values = sizes["linear_num_key_heads"] * sizes["linear_key_head_dim"], heads * width
        own = {"intermediate_size": sizes[_SHARED], "hidden_size": hidden}
        plain = Family(self.architecture, "")
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
        return name.startswith("mtp.")


QWEN3_NEXT = Qwen3Next(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    qk_norm=True,
    experts=True,
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
)
