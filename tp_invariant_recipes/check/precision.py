"""What stock numerics need for products in FP8 or FP4; invariant/fp8.py says it of invariant numerics."""

from collections.abc import Iterator

from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings import low_precision
from tp_invariant_recipes.settings.low_precision import MULTIPLE
from tp_invariant_recipes.settings.run_config import RunConfig


def _applies(config: RunConfig) -> bool:
    return low_precision.enabled(config) and not config.numerics.invariant


def _uneven(config: RunConfig) -> Iterator[Problem]:
    must = f"FP8 and FP4 products have sides that are multiples of {MULTIPLE}"
    for words, side in _sides(config).items() if config.device.kind == "gpu" else ():
        if side % MULTIPLE:
            yield Problem("", f"{must}, and {words} is {side:g}", "change it, or precision=bf16")


def _sides(config: RunConfig) -> dict[str, float]:
    """Return the sides of the products on one rank: name -> size."""
    model, shape = config.model, config.shape
    tp, etp = config.layout.tp, config.layout.etp
    mbs = config.train["micro_batch_size"]
    heads, width = shape.heads + 2 * shape.groups, shape.fields.get("kv_channels") or shape.hidden / shape.heads
    sides = {
        "seq * mbs / cp": shape.sequence * mbs / config.layout.cp,
        "model.hidden_size": shape.hidden,
        "the width of queries, keys and values / tp": heads * width / tp,
    }
    if shape.experts:
        sides["model.moe_ffn_hidden_size / etp"] = shape.expert_width / etp
        if shared := shape.shared_width:
            sides["model.moe_shared_expert_intermediate_size / tp"] = shared / tp
    else:
        sides["model.ffn_hidden_size / tp"] = shape.ffn / tp
    if "M" in shape.pattern:
        inner = shape.mamba_heads * shape.mamba_width
        states = shape.mamba_groups * shape.mamba_state
        sides["the width of Mamba's in_proj / tp"] = (2 * (inner + states) + shape.mamba_heads) / tp
    if families.delta_sizes(model):
        sides["the width of a gated delta net's in_proj / tp"] = 2 * sum(families.delta_widths(model)) / tp
    return sides


RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        lambda t: t.device.kind != "gpu",
        "FP8 and FP4 products need Transformer Engine on a GPU",
        "precision=bf16, or device=gpu",
        needs=_applies,
    ),
    Rule(_uneven, needs=_applies),
)
