# SPDX-License-Identifier: Apache-2.0
"""Which CUDA graphs a run of `cuda_graph=auto` captures: of the whole step, Transformer Engine's, or none.

Graphs take the launches from the host, whose speed decides the time of a small model's step. They change no bits.
"""

from collections.abc import Callable, Collection, Sequence

from tp_invariant_recipes.check.invariant import modes as mode_rules
from tp_invariant_recipes.config import hydra_tree
from tp_invariant_recipes.config.fingerprint import flat
from tp_invariant_recipes.config.overrides import Override, given
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings import finetuning, low_precision
from tp_invariant_recipes.settings.cuda_graphs import FULL
from tp_invariant_recipes.settings.run_config import RunConfig

GROUP, AUTO, OFF = "cuda_graph", "auto", "off"
# Tried in this order -> the steps of a run for which a capture pays. Qwen3-0.6B at 4096 tokens on an H100: a capture
# adds 0.16 s (full) or 3.9 s (te) and 0.06 GiB to 18.5; the steps after it take 0.25 or 0.28 s in place of 1.1.
LEAST_STEPS = {"full": 6, "te": 10}
OPTIONS = tuple(LEAST_STEPS)

# (tp, cp, ep) at which graphs of a whole step of experts were compared with eager runs, by the layers beside them.
_COMPARED = {
    "attention": {(1, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 1), (2, 1, 2), (1, 2, 1), (1, 2, 2)},
    "latent": {(1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 1, 2)},
    "mamba": {(1, 1, 2)},
    "delta": {(1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 1, 2)},
}

# What is captured only when asked for: its graphs have not been compared with eager runs.
EAGER: tuple[tuple[Callable[[RunConfig], bool], str], ...] = (
    (lambda t: t.device.kind != "gpu", "graphs need a GPU"),
    (low_precision.enabled, "tpi captures FP8 and FP4 GEMMs only on request; tpi audit compares them with eager ones"),
    (lambda t: finetuning.adapts(t) and not t.numerics.invariant, "tpi captures adapters only on request"),
    (lambda t: t.model.get("recompute_granularity") is not None, "tpi captures recomputation only on request"),
    (lambda t: t.overlaps() and t.numerics.invariant, "tpi captures Megatron's combined schedule only on request"),
)


def decides(overrides: Sequence[Override], *, recipe: bool) -> bool:
    """Whether the choice is open. A recipe decides unless the command line says auto; a field typed decides, too."""
    if chosen := given(overrides, GROUP):
        return chosen.value == AUTO
    return not recipe and not any(override.path.startswith("model.cuda_graph_") for override in overrides)


def eager_reason(config: RunConfig) -> str | None:
    """Why a run captures nothing, whatever could be captured. None: it may."""
    reasons = [why for applies, why in EAGER if applies(config)]
    return next(iter([*reasons, *_too_short(config, min(LEAST_STEPS.values()))]), None)


def beyond(config: RunConfig, option: str) -> list[str]:
    """Why graphs that a run allows are not chosen: a capture does not pay or was not compared, or Megatron waits.

    config: the run with the graphs of `option`. The last is about stock, where `tree` has no graph of a whole step.
    """
    short = _too_short(config, LEAST_STEPS[option])
    if config.shape.experts > 1 and config.model.get("cuda_graph_impl") == FULL and _uncompared(config):
        short.append("of such a run with experts tpi captures the whole step when asked")
    if config.model.get("cuda_graph_impl") != FULL:
        return short
    judged = config.with_fields("numerics", mode=mode.DEFAULT)
    return [*short, *(f"{limit.text}; {limit.solve}" for limit in mode_rules.GRAPH_LIMITS if limit.broken(judged))]


def captured(config: RunConfig, option: str, typed: Collection[str]) -> RunConfig:
    """Return the run with the fields that the file of an option sets, but for those that are typed.

    config: as composed with `cuda_graph=auto`. typed: by the command line, or by a user's own file.
    """
    for path, value in flat(hydra_tree.written(GROUP, option)).items():
        section, _, name = path.partition(".")
        if path not in typed:
            config = config.with_fields(section, **{name: value})
    return config


def _uncompared(config: RunConfig) -> bool:
    """Whether no graph of a whole step has been compared with eager runs of such a model with experts."""
    shape, at = config.shape, config.layout
    kinds = {"delta": families.delta_sizes(config.model), "latent": shape.latent, "mamba": shape.pattern}
    has = next((kind for kind, there in kinds.items() if there), "attention")
    return (at.tp, at.cp, at.ep) not in _COMPARED[has]


def _too_short(config: RunConfig, least: int) -> list[str]:
    steps = config.train["train_iters"]
    return [f"{steps} steps are fewer than the {least} for which a capture pays"] if steps < least else []
