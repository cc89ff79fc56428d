"""Which versions of Transformer Engine break the contract of weight gradients (tests/wgrad_contract.py), and how."""

from dataclasses import dataclass
from typing import Literal

from tests.wgrad_contract import (
    ACCUMULATES,
    CONTRACT,
    DELAYED,
    DELAYED_ACCUMULATES,
    DELAYED_FLAGGED,
    Returned,
    WgradMode,
)
from tp_invariant_recipes.patches.patch import within

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
