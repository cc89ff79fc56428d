# SPDX-License-Identifier: Apache-2.0
"""Which arithmetic a run computes with: one value a mode. Whatever depends on the mode asks this value.

A mode is a value of its module and a row of MODES; `conf/numerics/NAME.yaml` makes it an option of `numerics=`.
Its class derives from `Mode`, most from `Tree` of numerics/tree_modes.py. The values import neither torch nor Megatron
before a method is called, since the check of a configuration reads them.
`numerics=stock`, Bridge's own numerics, and `numerics=deterministic`, the same in Megatron's deterministic mode, are no
modes: `find` gives None.
"""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from tp_invariant_recipes.replacement import Replacement

if TYPE_CHECKING:
    from tp_invariant_recipes.numerics.layers.cross_entropy import LossKernels
    from tp_invariant_recipes.numerics.layers.formats.plain import Plain
    from tp_invariant_recipes.numerics.layers.norm import NormKernels

# Name -> MODULE:NAME of the mode's value.
MODES = {
    "tree": "tp_invariant_recipes.numerics.tree_modes:TREE",
    "gather": "tp_invariant_recipes.numerics.tree_modes:GATHER",
    "portable": "tp_invariant_recipes.portable.mode:MODE",
}
STOCK, DETERMINISTIC, DEFAULT = "stock", "deterministic", "tree"
MEGATRONS = STOCK, DETERMINISTIC  # Megatron's own sums: another layout adds in another order
NAMES = *MEGATRONS, *MODES
# The values of numerics.mode.
if TYPE_CHECKING:
    type ModeName = str
else:
    ModeName = Literal[NAMES]

# What a mode may cover beyond dense models of attention and feed-forward layers in bf16.
EXPERTS, HYBRID, LATENT = "experts", "Mamba layers", "multi-latent attention"
DELTA_NET, GATES = "gated delta nets", "gated attention and gated shared experts"
MTP, PACKED = "MTP", "packed sequences"
FAMILIES, CENTRED = "families with own layers", "zero-centred norm weights"
LAYER_NORM, LEARNED = "LayerNorm", "learned positions"
LORA, FINETUNING, TOKEN_LOSS = "LoRA", "fine-tuning", "a loss divided by the tokens of a step"
CONTEXT_SHARDS = "context parallelism"
FP8 = "FP8"
GUARD = "a guard"  # GEMMs that a host, or a repetition, can judge
FP64_NORM = "a gradient norm of plain fp64 sums"  # depends on the order of its sum
ALL_GRAPHS = frozenset({"te", "full"})  # options of cuda_graph=


class Mode(ABC):
    """An arithmetic whose bits do not depend on the layout.

    name:             the value of numerics.mode.
    covers:           of EXPERTS … FP64_NORM, what it has invariant versions of; check/invariant/ refuses the rest.
    graphs:           options of cuda_graph= that its layers were captured with.
    any_machine:      whether every machine that computes it gives the same bits, not one architecture alone.
    tries_products:   whether cuBLAS computes after an exactness check (numerics/gemm/defined.py), at a cost in memory.
    gathers_operands: whether a rank holds whole operands of a split product.
    layers:           stock class -> MODULE:CLASS of this package, where they differ from megatron/spec.py's table.
    """

    name: str
    covers: frozenset[str]
    graphs: frozenset[str]
    any_machine: bool = False
    tries_products: bool = True
    gathers_operands: bool = False
    layers: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def definition(self, device: str) -> str | None:
        """Return the version of a GEMM as a ledger's header names it (`product` in `device`); None: a library's.

        device: "cpu" or "gpu".
        """

    @abstractmethod
    def require_machine(self, gpu: int | None, *, fp8: bool = False) -> None:
        """Raise RunError if the device computes other bits than the mode defines.

        gpu: its index; None: the CPU. fp8: the run has GEMMs in FP8.
        """

    @abstractmethod
    def operands(self) -> "Plain":
        """Return what the layers' GEMMs compute with, in bf16 or fp32 (numerics/layers/formats/)."""

    @abstractmethod
    def norm(self) -> "NormKernels":
        """Forward and backward pass of RMSNorm."""

    @abstractmethod
    def cross_entropy(self) -> "LossKernels":
        """Return sums and gradients over the vocabulary."""

    def replacements(self) -> tuple[Replacement, ...]:
        """Rows beyond those of megatron/replacements.py."""
        return ()


@cache
def find(name: str) -> Mode | None:
    """Get the mode of a name; None for Megatron's own numerics, and for one that only another version has."""
    return pkgutil.resolve_name(MODES[name]) if name in MODES else None


def definition(name: str, device: str) -> str | None:
    """Return the version of a GEMM of numerics=NAME, if it has one. device: "cpu" or "gpu"."""
    mode = find(name)
    return mode.definition(device) if mode else None


def every() -> tuple[Mode, ...]:
    """All modes, in the order of the table."""
    return tuple(mode for name in MODES if (mode := find(name)))


def named_mode(name: str) -> Mode:
    """Return the mode of a name that is known to be one."""
    mode = find(name)
    assert mode is not None, name
    return mode


def mode_of(config: Any) -> Mode:
    """Return the mode of a Megatron configuration whose layers are invariant."""
    return named_mode(config.invariant_mode)


def only(feature: str) -> str:
    """Return the sentence of a refusal: "LoRA is covered by numerics=tree only"."""
    verb = "are" if feature.endswith("s") else "is"
    return f"{feature} {verb} covered by {' and '.join(named(lambda mode: feature in mode.covers))} only"


def named(has: Callable[[Mode], Any]) -> list[str]:
    """Return the modes of which something holds, as a message has them: ["numerics=tree", "numerics=portable"]."""
    return [f"numerics={mode.name}" for mode in every() if has(mode)]
