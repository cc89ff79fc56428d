# SPDX-License-Identifier: Apache-2.0
"""The limits of what a ledger records, and of what guard= guards (docs/guard.md)."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from tp_invariant_recipes.check.rule import Rule, value_of
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


def _guard(config: RunConfig) -> str:
    return f"guard={config.guard.kind}"


_row = partial(Rule, needs=lambda t: t.guard.kind != OFF, head=_guard)
_shadow = partial(Rule, needs=lambda t: t.guard.kind == SHADOW, head=_guard)


def _experts_on_all_replicas(config: RunConfig) -> bool:
    return 1 < config.parallel.data_parallel_size < 2 * rank_distance(config)


GUARD_RULES: tuple[Rule[RunConfig], ...] = (
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


_STEPS = re.compile(r"(\d+)(?::(\d+))?")
_TENSOR = re.compile(r"(forward|backward)/.+/(input|output)(\.\d+)?|(gradients|masters|weights)/.+")
_KINDS = ("forward/", "backward/", "gradients/", "masters/", "weights/")
_WILDCARD = re.compile(r"[*?[]")


def steps(trace: str) -> range:
    """Return the steps of `ledger.trace`, counted from 1. ValueError: it is neither FIRST:LAST nor a step."""
    match = _STEPS.fullmatch(trace)
    if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise ValueError(f"ledger.trace={trace}: must be FIRST:LAST, steps counted from 1, as in ledger.trace=1:3")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def _trace(config: RunConfig) -> Problem | None:
    trace = config.ledger.trace
    if trace is None:
        return None
    try:
        last = steps(str(trace))[-1]
    except ValueError as error:
        return Problem("", str(error))
    iters = config.train["train_iters"]
    problem = Problem(f"ledger.trace={trace}", f"the run ends at step {iters}", "raise iters or trace less")
    return problem if last > iters else None


def _graphs(config: RunConfig) -> Problem | None:
    if config.ledger.trace is None or not cuda_graphs.requested(config.model):
        return None
    requested = f"model.cuda_graph_impl={config.model['cuda_graph_impl']}"
    return Problem("ledger.trace", f"a replayed CUDA graph calls no module, and {requested}", "cuda_graph=off")


def _dump(config: RunConfig) -> Problem | None:
    dump = config.ledger.dump
    if wrong := ", ".join(name for name in dump if not _may_match(name)):
        forms = "forward/MODULE/output, backward/MODULE/input, gradients/PARAMETER, masters/PARAMETER or"
        return Problem("ledger.dump", f"{wrong}: a tensor is {forms} weights/PARAMETER, or a pattern with * or ?")
    undated = Problem("ledger.dump", "at which steps? set ledger.trace=FIRST:LAST")
    return undated if dump and not config.ledger.trace else None


def _may_match(pattern: str) -> bool:
    """Whether a tensor's name may match. The names themselves are known when the model is built."""
    start = _WILDCARD.split(pattern, maxsplit=1)[0]
    if start == pattern:
        return bool(_TENSOR.fullmatch(pattern))
    return any(kind.startswith(start) or start.startswith(kind) for kind in _KINDS)


def _undigested(test: Callable[[RunConfig], Any], text: str, solve: str) -> Rule[RunConfig]:
    """Return a rule about digests of gradients and weights."""
    return Rule(test, text, f"{solve}; or record none: ledger.digests=0", needs=lambda t: t.ledger.digests)


RULES: tuple[Rule[RunConfig], ...] = (
    Rule(lambda t: t.ledger.digests < 0, "must be 0 (never) or a number of steps", head=value_of("ledger.digests")),
    *map(Rule[RunConfig], (_trace, _graphs, _dump)),
    _undigested(lambda t: t.at("optimizer.optimizer_cpu_offload"),
        "digests: an optimizer on the CPU keeps master weights and moments there",
        "optimizer.optimizer_cpu_offload=false"),
    _undigested(lambda t: (t.model.get("gtp_weight_remat_size") or 1) > 1,
        "digests: weights spread over more ranks are not covered", "model.gtp_weight_remat_size=1"),
)  # fmt: skip
