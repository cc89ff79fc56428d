"""The section `peft`, Bridge's class LoRA: a run adapts weights if it has the section (docs/finetuning.md)."""

from collections.abc import Mapping
from typing import Any

from tp_invariant_recipes.numerics.megatron.adapters.adapted_layers import COLUMN_PARALLEL, ROW_PARALLEL, WHOLE
from tp_invariant_recipes.settings.run_config import RunConfig

SECTION = "peft"
# The layers that Bridge adapts where nothing is set.
DEFAULT = ("linear_qkv", "linear_fc1", "linear_proj", "linear_fc2")
FEED_FORWARD = ("linear_fc1", "linear_fc2")
TARGETS = (*COLUMN_PARALLEL, *ROW_PARALLEL, *WHOLE)
OTHERS = ("router",)  # of Megatron's
# Letters of a hybrid model's layers, as in `hybrid_layer_pattern` -> what can be adapted of them.
OF_LAYERS = {"M": ("in_proj", "out_proj"), "*": ("linear_qkv", "linear_proj"), "E-": FEED_FORWARD}
# How Bridge lets a matrix begin (megatron/bridge/peft/utils.py).
METHODS = ("xavier", "normal", "kaiming", "zero")
METHOD_FIELDS = ("lora_A_init_method", "lora_B_init_method")
# Fields that a recipe states whatever their value, since rules read them and a section must not be empty.
STATED = ("target_modules", "dim", "alpha", "dropout")


def section(config: RunConfig) -> Mapping[str, Any] | None:
    """Return the section of a run with adapters; None: it trains all weights."""
    return config.sections.get(SECTION)


def adapts(config: RunConfig) -> bool:
    """Whether a run trains adapters alone."""
    return section(config) is not None


def loses_bias(config: RunConfig) -> bool:
    """Whether steps move the bias of experts, which adapters' checkpoints lack: it is no weight, and never frozen."""
    moves = config.model.get("moe_router_enable_expert_bias") and config.model.get("moe_router_bias_update_rate") != 0
    return adapts(config) and bool(moves)


def targets(fields: Mapping[str, Any]) -> list[str]:
    """Names or patterns of the layers to adapt."""
    return list(fields.get("target_modules") or ()) if "target_modules" in fields else list(DEFAULT)


def of_feed_forward(fields: Mapping[str, Any]) -> bool:
    """Whether they are also of feed-forward layers, which have the names of experts' layers."""
    return bool({*FEED_FORWARD} & {*targets(fields)})


def dim(fields: Mapping[str, Any]) -> int:
    """Bridge's default where nothing is set."""
    return fields.get("dim", 32)
