"""Which arithmetic a run computes with: one value a mode. Whatever depends on the mode asks this value.

A mode is a file with a value `MODE` and a row of MODES; `conf/numerics/NAME.yaml` makes it an option of `numerics=`.
Its class derives from `Tree` of numerics/modes/tree.py, which says what a mode has. The values import neither torch nor
Megatron before a method is called, since the check of a configuration reads them.
`numerics=stock`, Bridge's own numerics, is no mode: `find` gives None.
"""

import pkgutil
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tp_invariant_recipes.numerics.modes.tree import Tree as Mode

# Name -> the module with the mode's value.
MODES = {
    "tree": "tp_invariant_recipes.numerics.modes.tree",
    "gather": "tp_invariant_recipes.numerics.modes.gather",
    "portable": "tp_invariant_recipes.portable.mode",
}
STOCK, DEFAULT = "stock", "tree"
# The values of numerics.mode.
if TYPE_CHECKING:
    type ModeName = str
else:
    ModeName = Literal[(STOCK, *MODES)]

# What a mode may cover beyond dense models of attention and feed-forward layers in bf16.
EXPERTS, HYBRID, LATENT = "experts", "Mamba layers", "multi-latent attention"
DELTA_NET, GATES = "gated delta nets", "gates of attention and of shared experts"
MTP, PACKED = "multi-token prediction", "packed sequences"
FAMILIES, CENTRED = "families with own layers", "zero-centred norm weights"
LAYER_NORM, LEARNED = "LayerNorm", "learned positions"
LORA, FINETUNING, TOKEN_LOSS = "LoRA", "fine-tuning", "a loss divided by the tokens of a step"
CONTEXT_SHARDS = "context parallelism"
FP8 = "FP8"
GUARD = "a guard"  # products that a host, or a repetition, can judge
FP64_NORM = "a gradient norm of plain fp64 sums"  # depends on the order of its sum
ALL_GRAPHS = frozenset({"te", "full"})  # options of cuda_graph=


@cache
def find(name: str) -> "Mode | None":
    """Get the mode of a name; None for stock and for a name of no mode, which a ledger of another version may have."""
    return pkgutil.resolve_name(f"{MODES[name]}:MODE") if name in MODES else None


def definition(name: str, device: str) -> str | None:
    """Return the version of a product of numerics=NAME, if it has one. device: "cpu" or "gpu"."""
    mode = find(name)
    return mode.definition(device) if mode else None


def every() -> "tuple[Mode, ...]":
    """All modes, in the order of the table."""
    return tuple(mode for name in MODES if (mode := find(name)))


def named_mode(name: str) -> "Mode":
    """Return the mode of a name that is known to be one."""
    mode = find(name)
    assert mode is not None, name
    return mode


def mode_of(config: Any) -> "Mode":
    """Return the mode of a Megatron configuration whose layers are invariant."""
    return named_mode(config.invariant_mode)


def only(feature: str) -> str:
    """Return the sentence of a refusal: "LoRA is covered by numerics=tree only"."""
    verb = "are" if feature.endswith("s") else "is"
    return f"{feature} {verb} covered by {' and '.join(named(lambda mode: feature in mode.covers))} only"


def named(has: Callable[["Mode"], Any]) -> list[str]:
    """Return the modes of which something holds, as a message has them: ["numerics=tree", "numerics=portable"]."""
    return [f"numerics={mode.name}" for mode in every() if has(mode)]
