"""What guard= cannot guard: one row a rule, so that tpi refuses an unsupported run before it starts (docs/guard.md)."""

from collections.abc import Callable
from dataclasses import fields

from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.settings import cuda_graphs, sft
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.sections import GuardSettings

OFF, SHADOW = "off", "shadow"


def ranks_apart(config: RunConfig) -> int:
    """How many data-parallel ranks on another replica is that holds the same experts: an expert's rank serves several.

    It is 1 without experts.
    """
    model = config.model
    if (model.get("num_moe_experts") or 0) <= 1:
        return 1
    experts = model["expert_model_parallel_size"] * (model.get("expert_tensor_parallel_size") or 1)
    return max(1, experts // (model["tensor_model_parallel_size"] * model["context_parallel_size"]))


def problems(config: RunConfig) -> list[str]:
    """All reasons why a run cannot be guarded as it asks to be."""
    guard = config.guard
    if guard.kind == OFF:
        changed = [one.name for one in fields(GuardSettings) if getattr(guard, one.name) != one.default]
        return [
            f"guard.{name}={getattr(guard, name)}: guard=off computes nothing again; guard=products" for name in changed
        ]
    rules = RULES + (SHADOW_RULES if guard.kind == SHADOW else ())
    return [f"guard={guard.kind}: {why}" for wrong, why in rules if wrong(config)]


def _one_shard(config: RunConfig) -> bool:
    return (config.numerics.data_shards or 1) <= config.parallel.data_parallel_size


def _one_shard_while_reducing(config: RunConfig) -> bool:
    return _one_shard(config) and bool(config.section("ddp").get("overlap_grad_reduce"))


# Whether a run breaks the rule, and why it cannot be guarded, with the key to change.
Rule = tuple[Callable[[RunConfig], bool], str]

RULES: tuple[Rule, ...] = (
    (lambda t: not t.numerics.covers(mode.GUARD),
     f"one wrong bit proves a fault only where all bits are promised; {mode.only(mode.GUARD)}; guard=off"),
    (lambda t: t.section("optimizer").get("optimizer", "adam") != "adam",
     "of optimizers only Adam is computed again; optimizer.optimizer=adam"),
    (lambda t: bool(t.section("optimizer").get("use_precision_aware_optimizer")),
     "state in other precisions is not computed again; optimizer.use_precision_aware_optimizer=false"),
    (lambda t: t.guard.exclude and not t.cluster.shared_files,
     "the first node must read another's evidence; guard.exclude=false, or cluster.shared_files=true"),
)  # fmt: skip

SHADOW_RULES: tuple[Rule, ...] = (
    (lambda t: t.parallel.data_parallel_size == 1,
     "dp=1 has no other replica to repeat a data shard; guard=products, or dp=2"),
    (lambda t: 1 < t.parallel.data_parallel_size < 2 * ranks_apart(t),
     "the experts are spread over all replicas, so that no other rank holds the same; raise dp, lower ep, or "
     "guard=products"),
    (lambda t: cuda_graphs.requested(t.model),
     "a captured step takes no other replica's data; cuda_graph=off, or guard=products"),
    (_one_shard_while_reducing,
     "gradients are on their way before a rank's only data shard is complete; ddp.overlap_grad_reduce=false, or "
     "numerics.data_shards of twice dp"),
    (lambda t: bool(t.model.get("virtual_pipeline_model_parallel_size")) and not _one_shard(t),
     "interleaved stages take no part of a step; numerics.data_shards of dp, or guard=products"),
    (lambda t: bool(t.ledger.trace),
     "a trace would see a data shard twice; leave ledger.trace out, or guard=products"),
    (lambda t: sft.is_sft(t.section("dataset")),
     "examples have unlike lengths, which replicas cannot exchange; guard=products"),
)  # fmt: skip
