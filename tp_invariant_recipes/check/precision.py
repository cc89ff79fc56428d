"""What stock numerics need for products in FP8 or FP4; invariant/fp8.py says it of invariant numerics."""

from tp_invariant_recipes.check.rule import Rule, RulePhase
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings import low_precision
from tp_invariant_recipes.settings.low_precision import MULTIPLE
from tp_invariant_recipes.settings.run_config import RunConfig


def _applies(config: RunConfig) -> bool:
    return low_precision.enabled(config) and not config.numerics.invariant


def _uneven(config: RunConfig) -> list[str]:
    if config.device.kind != "gpu":
        return []
    return [
        f"FP8 and FP4 products have sides that are multiples of {MULTIPLE}, and {words} is {side:g}; "
        f"change it, or precision=bf16"
        for words, side in _sides(config).items()
        if side % MULTIPLE
    ]


def _sides(config: RunConfig) -> dict[str, float]:
    """Return the sides of the products on one rank: name -> size."""
    model = config.model
    tp, etp = config.layout.tp, config.layout.etp
    mbs = config.train["micro_batch_size"]
    queries = model["num_attention_heads"]
    heads = queries + 2 * (model.get("num_query_groups") or queries)
    width = model.get("kv_channels") or model["hidden_size"] / queries
    sides = {
        "seq * mbs / cp": model["seq_length"] * mbs / config.layout.cp,
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
    if families.delta_sizes(model):
        sides["the width of a gated delta net's in_proj / tp"] = 2 * sum(families.delta_widths(model)) / tp
    return sides


RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        RulePhase.FEATURES,
        lambda t: t.device.kind != "gpu",
        "FP8 and FP4 products need Transformer Engine on a GPU; precision=bf16, or device=gpu",
        needs=_applies,
    ),
    Rule(RulePhase.FEATURES, _uneven, needs=_applies),
)
