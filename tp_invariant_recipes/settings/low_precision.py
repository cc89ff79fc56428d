"""Requirements of products in FP8 or FP4 on the configuration."""

from tp_invariant_recipes.settings.run_config import RunConfig

MULTIPLE = 16  # cuBLAS needs FP8 matrices with sides that are multiples of it; Transformer Engine refuses others
WORDS = ("fp8", "fp4")  # parts of the names of Bridge's recipes for them, also of mxfp8 and nvfp4


def enabled(config: RunConfig) -> bool:
    """Whether any product is in FP8 or FP4."""
    precision, model = config.mixed_precision, config.model
    if isinstance(precision, str):
        return any(word in precision or model.get(word) for word in WORDS)
    return any((precision or {}).get(word) or model.get(word) for word in WORDS)


def problems(config: RunConfig) -> list[str]:
    """All reasons why such products cannot be computed; empty if there are none."""
    if not enabled(config):
        return []
    if config.device.kind != "gpu":
        return ["FP8 and FP4 products need Transformer Engine on a GPU; precision=bf16, or device=gpu"]
    return [
        f"FP8 and FP4 products have sides that are multiples of {MULTIPLE}, and {words} is {side:g}; "
        f"change it, or precision=bf16"
        for words, side in _sides(config).items()
        if side % MULTIPLE
    ]


def _sides(config: RunConfig) -> dict[str, float]:
    """The sides of the products on one rank: name -> size."""
    model = config.model
    tp, etp = model["tensor_model_parallel_size"], model["expert_tensor_parallel_size"]
    mbs = config.train["micro_batch_size"]
    queries = model["num_attention_heads"]
    heads = queries + 2 * (model.get("num_query_groups") or queries)
    width = model.get("kv_channels") or model["hidden_size"] / queries
    sides = {
        "seq * mbs / cp": model["seq_length"] * mbs / model["context_parallel_size"],
        "model.hidden_size": model["hidden_size"],
        "the width of queries, keys and values / tp": heads * width / tp,
    }
    if model.get("num_moe_experts"):
        sides["model.moe_ffn_hidden_size / etp"] = (model.get("moe_ffn_hidden_size") or model["ffn_hidden_size"]) / etp
        if shared := model.get("moe_shared_expert_intermediate_size"):
            sides["model.moe_shared_expert_intermediate_size / tp"] = shared / tp
    else:
        sides["model.ffn_hidden_size / tp"] = model["ffn_hidden_size"] / tp
    if "M" in (model.get("hybrid_layer_pattern") or ""):
        inner = model["mamba_num_heads"] * model["mamba_head_dim"]
        states = model["mamba_num_groups"] * model["mamba_state_dim"]
        sides["the width of Mamba's in_proj / tp"] = (2 * (inner + states) + model["mamba_num_heads"]) / tp
    return sides
