# SPDX-License-Identifier: Apache-2.0
"""What the engine of rollouts does not cover: one table, for a configuration before the start and for a module."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings import low_precision
from tp_invariant_recipes.settings.run_config import RunConfig


@dataclass(frozen=True)
class Rolled:
    """What the rows read of a configuration, or of a module.

    field: a field of the model by name; None: it is unset. ahead: whether there is MTP. layers: kinds of layers that
    have no cache, by name.
    """

    numerics: str
    pp: int
    fp8: bool
    ahead: bool
    field: Callable[[str], Any]
    layers: tuple[str, ...] = ()


def _inexact(model: Rolled) -> bool:
    arithmetic = mode.find(model.numerics)
    return arithmetic is None or not arithmetic.any_machine


Row = tuple[Callable[[Rolled], Any], Callable[[Rolled], str], str, str]  # the test, its key, why, what to do

ROWS: dict[str, Row] = {
    "numerics": (
        _inexact, lambda t: f"numerics={t.numerics}", "a cached row is not shown to have the bits of a whole pass",
        "numerics=portable, in patch mode with TPI_NUMERICS=portable",
    ),
    "pp": (
        lambda t: t.pp > 1, lambda t: f"pp={t.pp}", "a rank of rollouts computes all layers", "pp=1, and a larger tp",
    ),
    "fp8": (
        lambda t: t.fp8, lambda _: "precision",
        "FP8 scales a tensor by all tokens of a pass, so rows depend on each other", "precision=bf16",
    ),
    "mtp": (
        lambda t: t.ahead, lambda _: "model.mtp_num_layers", "layers of MTP have no cache", "model.mtp_num_layers=null",
    ),
    "windows": (
        lambda t: t.field("window_size"), lambda _: "model.window_size", "sliding-window attention has no cache",
        "leave it unset",
    ),
    "sinks": (
        lambda t: (t.field("softmax_type") or "vanilla") != "vanilla", lambda _: "model.softmax_type",
        "attention sinks have no cache", "model.softmax_type=vanilla",
    ),
    "mamba": (
        lambda t: t.field("hybrid_layer_pattern"), lambda _: "model.hybrid_layer_pattern",
        "Mamba layers have no cache", "a model of attention and gated delta nets",
    ),
    "layers": (
        lambda t: t.layers, lambda t: ", ".join(t.layers), "these layers have no cache", "a model with plain attention",
    ),
}  # fmt: skip


def uncovered(model: Rolled) -> list[str]:
    """Return what the engine does not cover, a line each."""
    return [str(Problem(key(model), why, solve)) for broken, key, why, solve in ROWS.values() if broken(model)]


def problems(config: RunConfig) -> list[str]:
    """Return what keeps this configuration from generating, beside what keeps it from a forward pass; a line each."""
    family = families.family_of(config.model)
    own, fp8 = (family,) if family else (), bool(low_precision.enabled(config))
    return uncovered(
        Rolled(config.numerics.mode, config.layout.pp, fp8, bool(config.shape.depths), config.model.get, own)
    )
