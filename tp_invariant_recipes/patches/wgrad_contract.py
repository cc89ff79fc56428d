"""What autograd gets for the weight of a linear layer, by how its gradient is kept.

Megatron gives each weight a `main_grad`, and its hook adds `weight.grad` to that unless the layer has said, by
`weight.grad_added_to_main_grad`, that it has done so itself. So a layer that wrote into `main_grad` must return None,
or, to Megatron, a dummy: a tensor of the right shape that nobody reads, since its hook takes no None where the
reduction of gradients is overlapped. What a layer must never return is `main_grad` itself, or a view of it: autograd
would make it `weight.grad`, the hook would add that to `main_grad`, and the gradient would be doubled. The table is
that of NVIDIA/TransformerEngine#2871.
"""

from dataclasses import dataclass
from typing import Literal

from tp_invariant_recipes.patches.patch import within

Returned = Literal["wgrad", "none", "dummy"]

# What code that breaks the contract returns: main_grad or a view of it; a buffer that nothing has been written to yet.
Broken = Literal["main_grad", "unwritten", "none"]


@dataclass(frozen=True)
class Mode:
    """How a weight's gradient is kept.

    delayed:     computed after the backward pass, by `backward_dw()`.
    accumulates: written into `main_grad` by the layer.
    flagged:     the weight has an attribute `grad_added_to_main_grad`, as Megatron's have. Matters with `accumulates`.
    """

    delayed: bool = False
    accumulates: bool = False
    flagged: bool = False

    def __str__(self) -> str:
        words = [word for word, holds in vars(self).items() if holds]
        return "-".join(words) or "vanilla"


VANILLA, DELAYED = Mode(), Mode(delayed=True)
ACCUMULATES, FLAGGED = Mode(accumulates=True), Mode(accumulates=True, flagged=True)
DELAYED_ACCUMULATES = Mode(delayed=True, accumulates=True)
DELAYED_FLAGGED = Mode(delayed=True, accumulates=True, flagged=True)

CONTRACT: dict[Mode, Returned] = {
    VANILLA: "wgrad",
    DELAYED: "none",
    ACCUMULATES: "none",
    FLAGGED: "dummy",
    DELAYED_ACCUMULATES: "none",
    DELAYED_FLAGGED: "dummy",
}

# Layer -> the first version of Transformer Engine that has it. "single": one grouped weight instead of one a GEMM.
LAYERS = {
    "Linear module": "2.11",
    "GroupedLinear module": "2.11",
    "GroupedLinear op": "2.13",
    "GroupedLinear op, single": "2.14",
    "fused grouped MLP": "2.14",
    "fused grouped MLP, single": "2.14",
}


@dataclass(frozen=True)
class Deviation:
    """A cell that some versions break. patch: the row of the registry that fixes it."""

    layer: str
    mode: Mode
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


def contract(mode: Mode, layer: str) -> Returned:
    """What `layer` has to return in `mode`: the same for all layers. Raises KeyError for one that is not known."""
    LAYERS[layer]
    return CONTRACT[mode]


def upstream(mode: Mode, layer: str, version: str) -> Returned | Broken:
    """What that layer of Transformer Engine `version` returns, unpatched."""
    for deviation in DEVIATIONS:
        if (deviation.layer, deviation.mode) == (layer, mode) and within(version, deviation.versions):
            return deviation.returns
    return contract(mode, layer)
