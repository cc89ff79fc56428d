"""GLM-4.5: dense layers first, then experts with a shared one, and perhaps a layer of multi-token prediction."""

from collections.abc import Iterator, Mapping
from typing import Any

from tp_invariant_recipes.sources.hf_family import FIELDS, Family

# What Bridge's GLM45Bridge sets whatever config.json says, and the defaults of its provider.
OWN: dict[str, tuple[Any, Any]] = {
    "share_embeddings_and_output_weights": (False, True),
    "rotary_percent": (0.5, 1.0),
    "moe_router_score_function": ("sigmoid", "softmax"),
    "moe_router_enable_expert_bias": (True, False),
    "moe_router_pre_softmax": (False, False),
    "moe_router_dtype": ("fp32", None),
    "moe_router_num_groups": (None, None),
}
_ABSENT = ("norm_topk_prob", "num_experts", "tie_word_embeddings")
BIAS = "mlp.gate.e_score_correction_bias"  # fp32 in every checkpoint: it is no weight
DEPTHS = "num_nextn_predict_layers"


class Glm45(Family):
    """Layers of two kinds. Hugging Face stores multi-token prediction as one more layer, which its own class skips."""

    @property
    def fields(self) -> Mapping[str, tuple[str, Any]]:
        """As of Family."""
        return {key: field for key, field in FIELDS.items() if key not in _ABSENT} | {
            "n_routed_experts": ("num_moe_experts", None),
            "routed_scaling_factor": ("moe_router_topk_scaling_factor", None),
            "first_k_dense_replace": ("moe_layer_freq", None),
            "use_qk_norm": ("qk_layernorm", False),
            "attention_bias": ("add_qkv_bias", False),
            DEPTHS: ("mtp_num_layers", None),
        }

    @property
    def shared(self) -> Mapping[str, tuple[Any, Any]]:
        """As of Family. The shared expert has the size of the others."""
        return {n: value for n, value in super().shared.items() if n != "moe_shared_expert_intermediate_size"} | OWN

    @property
    def fixed(self) -> Mapping[str, Any]:
        """As of Family."""
        return {
            "hidden_act": "silu",
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        }

    def of_model(self, key: str, sizes: Mapping[str, Any]) -> Any:
        """As of Family."""
        if key == "first_k_dense_replace":
            dense = sizes[key]
            return [0] * dense + [1] * (sizes["num_hidden_layers"] - dense)
        return sizes[key] or None if key == DEPTHS else sizes[key]

    def absent(self, key: str) -> tuple[Any, ...]:
        """As of Family."""
        return (0,) if key in ("first_k_dense_replace", DEPTHS) else ()

    def sizes(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """As of Family. Raises ValueError: dense layers stand elsewhere than first."""
        sizes = self._heads(model)
        sizes["moe_intermediate_size"] = sizes["moe_intermediate_size"] or sizes["intermediate_size"]
        sizes["first_k_dense_replace"] = dense_first(sizes["first_k_dense_replace"], sizes["num_hidden_layers"])
        sizes["routed_scaling_factor"] = float(sizes["routed_scaling_factor"] or 1.0)
        sizes |= {key: bool(sizes[key]) for key in ("use_qk_norm", "attention_bias")}
        return sizes | {"rope_factor": None, DEPTHS: sizes[DEPTHS] or 0}

    def config(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """As of Family."""
        sizes = self.sizes(model)
        theta = {"rope_theta": sizes.pop("rope_theta"), "rope_type": "default", "partial_rotary_factor": 0.5}
        del sizes["rope_factor"]
        longest = max(model["seq_length"], 131072)
        return sizes | {**self.fixed, "max_position_embeddings": longest, "rope_parameters": theta}

    def tensors(self, sizes: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """As of Family."""
        hidden, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
        every = {**sizes, "tie_word_embeddings": False, "num_hidden_layers": layers + sizes[DEPTHS]}
        plain = Family(self.architecture, "", bool(sizes["attention_bias"]), bool(sizes["use_qk_norm"]))
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
        """As of Family: copies of the embedding and the output layer in the layer of multi-token prediction."""
        last = f"model.layers.{sizes['num_hidden_layers'] + sizes[DEPTHS] - 1}."
        return sizes[DEPTHS] > 0 and name in (f"{last}embed_tokens.weight", f"{last}shared_head.head.weight")


def dense_first(frequency: Any, layers: int) -> int | None:
    """How many layers are dense, all of them before those of experts; None: the layers come in another order."""
    if not isinstance(frequency, list | tuple):
        return 0 if (frequency or 1) == 1 else None
    dense = frequency.index(1) if 1 in frequency else layers
    return dense if [*frequency] == [0] * dense + [1] * (layers - dense) else None


GLM_45 = Glm45("Glm4MoeForCausalLM", "glm4_moe", experts=True)
