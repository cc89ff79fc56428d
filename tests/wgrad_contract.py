# SPDX-License-Identifier: Apache-2.0
"""The value that a linear layer must return to autograd for its weight, by the way the gradient is kept.

The table comes from NVIDIA/TransformerEngine#2871. Which versions of Transformer Engine break it, and how, is below.
"""

from dataclasses import dataclass
from typing import Literal

from tp_invariant_recipes.patches.patch import within

Returned = Literal["wgrad", "none", "dummy"]


@dataclass(frozen=True)
class WgradMode:
    """The way a weight's gradient is kept.

    delayed:     `backward_dw()` computes it after the backward pass.
    accumulates: the layer writes it into `main_grad`.
    flagged:     the weight has an attribute `grad_added_to_main_grad`, as Megatron's have. Matters with `accumulates`.
    """

    delayed: bool = False
    accumulates: bool = False
    flagged: bool = False

    def __str__(self) -> str:
        words = [word for word, holds in vars(self).items() if holds]
        return "-".join(words) or "vanilla"


VANILLA, DELAYED = WgradMode(), WgradMode(delayed=True)
ACCUMULATES, FLAGGED = WgradMode(accumulates=True), WgradMode(accumulates=True, flagged=True)
DELAYED_ACCUMULATES = WgradMode(delayed=True, accumulates=True)
DELAYED_FLAGGED = WgradMode(delayed=True, accumulates=True, flagged=True)

CONTRACT: dict[WgradMode, Returned] = {
    VANILLA: "wgrad", DELAYED: "none", ACCUMULATES: "none", FLAGGED: "dummy", DELAYED_ACCUMULATES: "none",
    DELAYED_FLAGGED: "dummy",
}  # fmt: skip

# Returned values that break the contract: main_grad or a view of it; a buffer not written yet; None for a dummy.
Broken = Literal["main_grad", "unwritten", "none"]

# Layer -> the first version of Transformer Engine that has it. "single": one grouped weight instead of one a GEMM.
LAYERS = {
    "Linear module": "2.11", "GroupedLinear module": "2.11", "GroupedLinear op": "2.13",
    "GroupedLinear op, single": "2.14", "fused grouped MLP": "2.14", "fused grouped MLP, single": "2.14",
}  # fmt: skip


@dataclass(frozen=True)
class Deviation:
    """A cell that some versions break. patch: the row of the registry that fixes it."""

    layer: str
    mode: WgradMode
    versions: str
    returns: Broken
    patch: str


DEVIATIONS = (
    Deviation("GroupedLinear module", DELAYED, ">=2.11", "unwritten", "te-grouped-linear-delayed-wgrad"),
    Deviation("GroupedLinear op", DELAYED_FLAGGED, ">=2.14,<2.15", "none", "te-grouped-op-wgrad"),
    Deviation("fused grouped MLP", ACCUMULATES, ">=2.14,<2.15", "main_grad", "te-grouped-mlp-wgrad"),
    Deviation("fused grouped MLP", DELAYED_ACCUMULATES, ">=2.14,<2.15", "main_grad", "te-grouped-mlp-wgrad"),
    Deviation("fused grouped MLP, single", ACCUMULATES, ">=2.14,<2.16", "main_grad", "te-grouped-mlp-wgrad"),
)


def contract(mode: WgradMode, layer: str) -> Returned:
    """The value that `layer` must return in `mode`; all layers share it. Raises KeyError for an unknown layer."""
    LAYERS[layer]
    return CONTRACT[mode]


def upstream(mode: WgradMode, layer: str, version: str) -> Returned | Broken:
    """The value that `layer` of Transformer Engine `version` returns without patches."""
    for deviation in DEVIATIONS:
        if (deviation.layer, deviation.mode) == (layer, mode) and within(version, deviation.versions):
            return deviation.returns
    return contract(mode, layer)
