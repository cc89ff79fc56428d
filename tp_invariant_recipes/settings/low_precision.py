# SPDX-License-Identifier: Apache-2.0
"""Products in FP8 or FP4: what a configuration asks for, and what such products require of it."""

from typing import Any

from tp_invariant_recipes.numerics.precision import Fp8Layers
from tp_invariant_recipes.settings.run_config import RunConfig

MULTIPLE = 16  # cuBLAS needs FP8 matrices with sides that are multiples of it; Transformer Engine refuses others
WORDS = ("fp8", "fp4")  # parts of the names of Bridge's recipes for them, also of mxfp8 and nvfp4
MXFP8 = "mxfp8"
FP8_WEIGHTS = ("fp8_param", "fp8_param_gather")  # whether weights stay in FP8 between steps
REUSED = "reuse_grad_buf_for_mxfp8_param_ag"  # whether they are then gathered in the gradients' memory

_TWO_IN_BF16 = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 2}

# Bridge's recipes that the invariant numerics have -> their fields of FP8, but for `fp8_param_gather` (`remark`).
NAMED: dict[str, dict[str, Any]] = {
    "bf16_with_fp8_current_scaling_mixed": {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
    },
    "bf16_with_fp8_subchannel_scaling_mixed": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    "bf16_with_mxfp8_mixed": {"fp8": "e4m3", "fp8_recipe": MXFP8},
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": {"fp8": "hybrid", "fp8_recipe": "tensorwise", **_TWO_IN_BF16},
    "nanov2_bf16_with_fp8_current_scaling_mixed": {"fp8": "hybrid", "fp8_recipe": "blockwise", **_TWO_IN_BF16},
}
# Fields of Bridge's MixedPrecisionConfig about FP8 alone.
OF_FP8 = ("fp8", "fp8_recipe", *_TWO_IN_BF16, *FP8_WEIGHTS, REUSED)
# Those of them that set fp8_param_gather.
KEEPING = tuple(name for name in NAMED if "current_scaling" in name or MXFP8 in name)
RECIPES = ("tensorwise", "blockwise", MXFP8)


def enabled(config: RunConfig) -> bool:
    """Whether any product is in FP8 or FP4."""
    precision, model = config.mixed_precision, config.model
    if isinstance(precision, str):
        return any(word in precision or model.get(word) for word in WORDS)
    return any((precision or {}).get(word) or model.get(word) for word in WORDS)


def fields(precision: Any) -> dict[str, Any]:
    """Return the fields that a section mixed_precision sets; of a recipe of Bridge's those of FP8, if it is known."""
    if isinstance(precision, str):
        return NAMED.get(precision.replace("-", "_"), {})
    return precision or {}


def fp8_layers(config: RunConfig) -> Fp8Layers | None:
    """Return the FP8 products of a run with invariant numerics; None: it has none, or others than these have."""
    values = fields(config.mixed_precision)
    recipe, kind = values.get("fp8_recipe", "tensorwise"), values.get("fp8")
    if not config.numerics.invariant or recipe not in RECIPES or kind not in ("hybrid", "e4m3"):
        return None
    ends = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    first, last = (values.get(name) or 0 if values.get("first_last_layers_bf16") else 0 for name in ends)
    return Fp8Layers(recipe, "e5m2" if kind == "hybrid" else "e4m3", first, last)


def adds_fp8(config: RunConfig) -> bool:
    """Whether tensor cores multiply FP8 or FP4. Invariant numerics multiply the numbers of MXFP8 as bf16."""
    layers = fp8_layers(config)
    return enabled(config) and (layers is None or layers.recipe != MXFP8)


def remark(config: RunConfig) -> str | None:
    """Return what a run with invariant numerics does otherwise than its precision says of itself; None: nothing."""
    name, layers, remarks = config.mixed_precision, fp8_layers(config), []
    if layers is not None and layers.recipe == MXFP8:
        remarks.append("MXFP8's numbers are multiplied in bf16 on any GPU, and rounding takes time beside that")
    if isinstance(name, str) and layers is not None and name.replace("-", "_") in KEEPING:
        when = "in every pass" if layers.recipe == MXFP8 else "once a step"
        remarks.append(f"weights are kept in bf16 and quantized {when}, as with fp8_param_gather=false")
    label = name if isinstance(name, str) else MXFP8
    return f"{'mixed_' if isinstance(name, str) else ''}precision={label}: {'; '.join(remarks)}" if remarks else None
