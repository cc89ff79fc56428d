# SPDX-License-Identifier: Apache-2.0
"""The section `numerics` of the configuration."""

from dataclasses import dataclass
from typing import Literal

from tp_invariant_recipes.numerics.mode import DEFAULT, Mode, ModeName, find

PeerMemory = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class NumericsSettings:
    """Which sums are fixed, and how (docs/numerics.md).

    mode:            what adds across ranks.
    virtual_shards:  V, virtual shards of the invariant modes.
    data_shards:     D, their data shards; part of the identity.
    context_shards:  C, their context shards; part of the identity.
    expert_groups:   X, their expert groups; part of the identity. None: the model has no experts.
    grad_norm:       the invariant modes' gradient norm: exact, or a plain fp64 sum as in the published scheme.
    clip_rounding:   pow2 rounds the clipping coefficient down to a power of two, as in the published scheme.
    initial_weights: invariant: a function of seed, name and place alone; megatron: drawn by Megatron's own generators.
    adjust:          whether the invariant modes set right what a recipe sets of how a model is computed
                     (config/adjusted.py), and say so; False: they refuse it.
    """

    mode: ModeName = DEFAULT
    virtual_shards: int | None = None
    data_shards: int | None = None
    context_shards: int | None = None
    expert_groups: int | None = None
    grad_norm: Literal["exact", "fp64"] = "exact"
    clip_rounding: Literal["none", "pow2"] = "none"
    initial_weights: Literal["invariant", "megatron"] = "invariant"
    adjust: bool = True

    @property
    def arithmetic(self) -> Mode | None:
        """The mode's value; None: Bridge's own numerics (stock, deterministic)."""
        return find(self.mode)

    @property
    def invariant(self) -> bool:
        """Whether sums have one order for every layout."""
        return self.arithmetic is not None

    def covers(self, feature: str) -> bool:
        """Whether the mode has an invariant version of one of the features of numerics/mode.py."""
        return self.arithmetic is not None and feature in self.arithmetic.covers
