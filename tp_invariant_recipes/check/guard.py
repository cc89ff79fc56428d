"""What guard= cannot guard: docs/guard.md describes it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.settings import cuda_graphs, finetuning
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.sections import GuardSettings

OFF, PRODUCTS, SHADOW = "off", "products", "shadow"


def rank_distance(config: RunConfig) -> int:
    """How many data-parallel ranks on another replica is that holds the same experts: an expert's rank serves several.

    It is 1 without experts.
    """
    if config.shape.experts <= 1:
        return 1
    experts = config.layout.ep * (config.layout.etp or 1)
    return max(1, experts // (config.layout.tp * config.layout.cp))


def _changed(config: RunConfig) -> list[Problem]:
    defaults = vars(GuardSettings())
    return [
        Problem(f"guard.{name}={value}", "guard=off computes nothing again", "guard=products")
        for name, value in vars(config.guard).items()
        if name != "kind" and value != defaults[name]
    ]


def _single_shard(config: RunConfig) -> bool:
    return (config.numerics.data_shards or 1) <= config.parallel.data_parallel_size


def _row(
    test: Callable[[RunConfig], Any], text: str, solve: str, kinds: tuple[str, ...] = (PRODUCTS, SHADOW)
) -> Rule[RunConfig]:
    return Rule(test, text, solve, needs=lambda t: t.guard.kind in kinds, head=lambda t: f"guard={t.guard.kind}")


_shadow = partial(_row, kinds=(SHADOW,))


def _experts_on_all_replicas(config: RunConfig) -> bool:
    return 1 < config.parallel.data_parallel_size < 2 * rank_distance(config)


RULES: tuple[Rule[RunConfig], ...] = (
    Rule(_changed, needs=lambda t: t.guard.kind == OFF),
    _row(lambda t: not t.numerics.covers(mode.GUARD),
     f"one corrupted value proves a fault only where all bits are guaranteed; {mode.only(mode.GUARD)}", "guard=off"),
    _row(lambda t: (t.at("optimizer.optimizer") or "adam") != "adam",
     "of optimizers only Adam is computed again", "optimizer.optimizer=adam"),
    _row(lambda t: t.at("optimizer.use_precision_aware_optimizer"),
     "state in other precisions is not computed again", "optimizer.use_precision_aware_optimizer=false"),
    _shadow(lambda t: t.parallel.data_parallel_size == 1,
     "dp=1 has no other replica to recompute a data shard", "guard=products, or dp=2"),
    _shadow(_experts_on_all_replicas,
     "the experts are spread over all replicas, so that no other rank holds the same",
     "raise dp, lower ep, or guard=products"),
    _shadow(lambda t: cuda_graphs.requested(t.model),
     "a captured step takes no other replica's data", "cuda_graph=off, or guard=products"),
    _shadow(lambda t: _single_shard(t) and t.at("ddp.overlap_grad_reduce"),
     "gradients are on their way before a rank's only data shard is complete",
     "ddp.overlap_grad_reduce=false, or numerics.data_shards of twice dp"),
    _shadow(lambda t: bool(t.model.get("virtual_pipeline_model_parallel_size")) and not _single_shard(t),
     "interleaved stages take no part of a step", "numerics.data_shards of dp, or guard=products"),
    _shadow(lambda t: bool(t.ledger.trace),
     "a trace would see a data shard twice", "leave ledger.trace out, or guard=products"),
    _shadow(lambda t: finetuning.is_sft(t.section("dataset")),
     "examples have unlike lengths, which replicas cannot exchange", "guard=products"),
)  # fmt: skip
