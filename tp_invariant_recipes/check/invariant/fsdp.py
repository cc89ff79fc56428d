# SPDX-License-Identifier: Apache-2.0
"""What the invariant modes cover of Megatron-FSDP: what numerics/megatron/fsdp.py adds in the tree's order."""

from collections.abc import Iterator

from tp_invariant_recipes.check.rule import Rule, becomes, cuts_sequences, limit_of
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings import finetuning
from tp_invariant_recipes.settings.run_config import RunConfig

_GRADIENTS = "ddp.megatron_fsdp_main_grads_dtype"
_STRATEGY, _DDP = "ddp.data_parallel_sharding_strategy", "ddp.use_megatron_fsdp=false"


def _limits(config: RunConfig) -> Iterator[Problem]:
    """Yield what an invariant run cannot have beside FSDP."""
    if config.fsdp == "no_shard":
        yield Problem(f"{_STRATEGY}=no_shard", "it shards nothing, as DistributedDataParallel", _DDP)
    if config.at(_GRADIENTS) is None:
        yield Problem(f"{_GRADIENTS}=null", "FSDP would add gradients in the weights' dtype", f"{_GRADIENTS}=float32")
    if cuts_sequences(config):
        cut = "model.context_parallel_size=1 numerics.context_shards=1"
        yield Problem("", "FSDP has no gradients of context shards", f"{cut}, or {_DDP}")
    if finetuning.packing(config) is not None:
        yield Problem("", "FSDP is not covered with packed sequences", f"{finetuning.PACKING}=null, or {_DDP}")
    if config.guard.kind != "off":
        yield Problem(f"guard={config.guard.kind}", "the guard reads whole gradients", f"guard=off, or {_DDP}")
    # Layers of experts and Mamba mixers read weights of modules below them, whose own hooks never run.
    if config.fsdp != "optim_grads_params" and config.at("ddp.overlap_param_gather"):
        key = "ddp.overlap_param_gather"
        yield Problem(f"{key}=true", "a layer may read weights that are still being gathered", f"{key}=false")


def _passes(config: RunConfig) -> Iterator[Problem]:
    """Yield what sharded gradients need: a backward pass is one data shard, of the tree over them and over experts'."""
    batch, numerics = config.train.get("global_batch_size") or 0, config.numerics
    optim = f"{_STRATEGY}=optim"
    if numerics.data_shards != batch:
        power = f"numerics.data_shards={batch}" if batch and not batch & (batch - 1) else "gbs=1, 2, 4 …"
        text = f"no rank keeps whole gradients, so each of the {batch} sequences of a step must be a data shard"
        yield Problem(f"{_STRATEGY}={config.fsdp}", text, f"{power}, or {optim}")
    elif numerics.expert_groups not in (None, batch):
        text = "so an expert's gradient must be a tree over data shards, too"
        yield Problem(f"{_STRATEGY}={config.fsdp}", text, f"numerics.expert_groups={batch}, or {optim}")


def _without(config: RunConfig) -> Problem | None:
    """Return a strategy that DistributedDataParallel would ignore."""
    strategy = config.at(_STRATEGY)
    if strategy in (None, "no_shard"):
        return None
    return Problem(f"{_STRATEGY}={strategy}", "only FSDP reads it", "ddp.use_megatron_fsdp=true, or leave it out")


RULES: tuple[Rule[RunConfig], ...] = tuple(
    limit_of(needs, test, adjust=adjust)
    for test, needs, adjust in (
        (_limits, lambda t: t.fsdp, ()),
        (_without, lambda t: not t.fsdp, becomes("no_shard", _STRATEGY)),
        (_passes, lambda t: t.fsdp in ("optim_grads", "optim_grads_params"), ()),
    )
)
