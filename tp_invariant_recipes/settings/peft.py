"""The section `peft`, Bridge's class LoRA: a run adapts weights if it has the section (docs/finetuning.md)."""

from collections.abc import Mapping
from typing import Any

from tp_invariant_recipes.settings.run_config import RunConfig

SECTION = "peft"
# The layers that Bridge adapts where nothing is set.
DEFAULT = ("linear_qkv", "linear_fc1", "linear_proj", "linear_fc2")
FEED_FORWARD = ("linear_fc1", "linear_fc2")
# The layers that the invariant numerics adapt, of multi-latent attention and Mamba, too: tensor parallelism splits
# a layer's rows or its columns, or every rank holds it whole.
COLUMN_PARALLEL = ("linear_qkv", "linear_fc1", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "in_proj")
ROW_PARALLEL = ("linear_proj", "linear_fc2", "out_proj")
WHOLE = ("linear_q_down_proj", "linear_kv_down_proj")
TARGETS = (*COLUMN_PARALLEL, *ROW_PARALLEL, *WHOLE)
OTHERS = ("router",)  # of Megatron's
# How Bridge lets a matrix begin (megatron/bridge/peft/utils.py).
METHODS = ("xavier", "normal", "kaiming", "zero")
METHOD_FIELDS = ("lora_A_init_method", "lora_B_init_method")
# Fields that a recipe states whatever their value, since rules read them and a section must not be empty.
STATED = ("target_modules", "dim", "alpha", "dropout")


def section(config: RunConfig) -> Mapping[str, Any] | None:
    """The section of a run with adapters; None: it trains all weights."""
    return config.sections.get(SECTION)


def adapts(config: RunConfig) -> bool:
    """Whether a run trains adapters alone."""
    return section(config) is not None


def targets(fields: Mapping[str, Any]) -> list[str]:
    """Names or patterns of the layers to adapt."""
    return list(fields.get("target_modules") or ()) if "target_modules" in fields else list(DEFAULT)


def dim(fields: Mapping[str, Any]) -> int:
    """Bridge's default where nothing is set."""
    return fields.get("dim", 32)
