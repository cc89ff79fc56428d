"""What the invariant numerics cover of LoRA."""

from collections.abc import Callable, Mapping
from typing import Any

from tp_invariant_recipes.check.invariant.limit import limit, limit_of, uncaptured, uncut
from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.settings import peft
from tp_invariant_recipes.settings.run_config import RunConfig

# Fields that add other layers or sums.
OFF = ("exclude_modules", "canonical_mapping", "a2a_experimental", "sequence_parallel_input_regather", "lora_dtype")


def of_experts(config: RunConfig, fields: Mapping[str, Any]) -> bool:
    """Whether adapters are of experts: feed-forward layers of a model with experts have all one name."""
    return bool(config.shape.experts) and peft.of_feed_forward(fields)


def _row(wrong: Callable[[RunConfig, Mapping[str, Any]], Any], text: str, solve: str = "") -> Rule[RunConfig]:
    """wrong: of a run with adapters, and of its section."""
    return limit(lambda t: (fields := peft.section(t)) is not None and wrong(t, fields), text, solve)


def _off(name: str) -> Callable[[RunConfig, Mapping[str, Any]], Any]:
    return lambda t, fields: fields.get(name)


LIMITS = (
    _row(lambda t, _: not t.numerics.covers(mode.LORA), mode.only(mode.LORA)),
    _row(
        lambda t, fields: not peft.targets(fields) or {*peft.targets(fields)} - {*peft.TARGETS},
        f"of layers only {', '.join(peft.TARGETS)} have invariant adapters, in all layers alike",
        "name these in peft.target_modules",
    ),
    _row(
        lambda t, fields: fields.get("dropout"),
        "dropout of adapters draws other numbers in every layout", "peft.dropout=0",
    ),
    *(_row(_off(name), f"peft.{name} is not covered", "leave it unset") for name in OFF),
    limit_of(peft.adapts, *uncut("LoRA has")),
    limit_of(peft.adapts, *uncaptured("adapters have")),
    _row(
        lambda t, _: t.model.get("pipeline_model_parallel_layout"),
        "a stage without layers has no adapter to send a gradient to", "model.pipeline_model_parallel_layout=null",
    ),
)  # fmt: skip
