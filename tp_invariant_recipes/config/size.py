"""How large a model is, from its dimensions."""

from typing import Any


def parameters(model: dict[str, Any]) -> int:
    """Roughly how many parameters a model section describes: embeddings, attention, feed-forward, experts."""
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    # Where these are null, Megatron-Core derives them so.
    ffn = model.get("ffn_hidden_size") or 4 * hidden
    groups = model.get("num_query_groups") or heads
    width = model.get("kv_channels") or hidden // heads
    gates = 3 if model["gated_linear_unit"] else 2
    attention = hidden * width * (2 * heads + 2 * groups)
    feed = gates * hidden * ffn
    if model.get("num_moe_experts"):
        shared = model.get("moe_shared_expert_intermediate_size") or 0
        feed = gates * hidden * (model["num_moe_experts"] * model["moe_ffn_hidden_size"] + shared)
    embeddings = model["vocab_size"] * hidden * (1 if model["share_embeddings_and_output_weights"] else 2)
    pattern = model.get("hybrid_layer_pattern")
    if not pattern:
        return embeddings + model["num_layers"] * (attention + feed)
    inner = model["mamba_num_heads"] * model["mamba_head_dim"]
    mamba = hidden * (3 * inner + 2 * model["mamba_num_groups"] * model["mamba_state_dim"])
    return embeddings + pattern.count("M") * mamba + pattern.count("*") * attention + pattern.count("E") * feed
