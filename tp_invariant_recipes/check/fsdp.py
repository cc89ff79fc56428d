# SPDX-License-Identifier: Apache-2.0
"""What tpi covers of Megatron-FSDP (version 1, as Megatron-Core 0.19.2 has it): under any numerics, and the invariant
ones, whose tree adds what numerics/megatron/fsdp.py reduces.
"""

from collections.abc import Iterator
from typing import Any

from tp_invariant_recipes.check.rule import Rule, becomes, cuts_sequences, limit_of
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.fields.field import Values, as_text, only
from tp_invariant_recipes.settings import cuda_graphs, finetuning, low_precision
from tp_invariant_recipes.settings.run_config import FSDP_FORMAT, STRATEGIES, RunConfig

_HYBRID = "hybrid sharding (HSDP) is not covered"
_PRECISION = "FSDP's own precisions are not covered: weights are bf16, masters, gradients and their sums fp32"
_BUFFERS = "buffers that NCCL registers or that FSDP reuses are not covered"
_OFFLOAD = "states on the CPU are not covered with FSDP"


def _if_set(*values: Any) -> Values:
    """Return these values, and none at all."""
    return Values(only(None, *values).accepts, only(*values).remedy)


_UNSET = _if_set(False)

# Field -> the values that it may have beside FSDP, and the reason. A field that a run leaves out has its default.
FIELDS: dict[str, tuple[Values, str]] = {
    "ddp.data_parallel_sharding_strategy": (only(*STRATEGIES), "FSDP has no such strategy"),
    "ddp.outer_dp_sharding_strategy": (_if_set("no_shard"), _HYBRID),
    "ddp.num_distributed_optimizer_instances": (_if_set(1), _HYBRID),
    "ddp.megatron_fsdp_main_params_dtype": (_if_set("float32"), _PRECISION),
    "ddp.megatron_fsdp_main_grads_dtype": (_if_set("float32"), _PRECISION),
    "ddp.megatron_fsdp_grad_comm_dtype": (_if_set("float32"), _PRECISION),
    "ddp.grad_reduce_in_fp32": (_if_set(True), _PRECISION),
    "optimizer.use_precision_aware_optimizer": (_UNSET, _PRECISION),
    "ddp.average_in_collective": (_UNSET, "each rank divides its gradient by dp before the sum"),
    "ddp.reuse_grad_buf_for_mxfp8_param_ag": (_UNSET, _PRECISION),
    "ddp.megatron_fsdp_use_decoupled_grad": (_UNSET, _PRECISION),
    "ddp.fp8_param_gather": (_UNSET, _PRECISION),
    "ddp.keep_fp8_transpose_cache": (_UNSET, _PRECISION),
    "ddp.nccl_ub": (_UNSET, _BUFFERS),
    "ddp.fsdp_double_buffer": (_UNSET, _BUFFERS),
    "ddp.fsdp_manual_registration": (_UNSET, _BUFFERS),
    "ddp.megatron_fsdp_cuda_graph_mode": (_UNSET, "CUDA graphs are not covered with FSDP"),
    "ddp.megatron_fsdp_enable_fine_grained_param_gather": (_UNSET, "weights are gathered layer by layer"),
    "model.init_model_with_meta_device": (_UNSET, "weights are drawn before they are sharded"),
    "optimizer.optimizer_cpu_offload": (_UNSET, _OFFLOAD),
    "model.cpu_offloading": (_UNSET, _OFFLOAD),
    "optimizer.optimizer": (only("adam"), "Megatron-Core shards the states of Adam alone"),
    "model.pipeline_model_parallel_size": (_if_set(1), "FSDP's device mesh has no pipeline stages"),
    "checkpoint.ckpt_format": (only(FSDP_FORMAT), "FSDP saves DTensors"),
    "checkpoint.async_save": (_UNSET, "checkpoints of FSDP are written at once"),
    "dist.use_tp_pp_dp_mapping": (_UNSET, "FSDP's device mesh has Megatron's default order of ranks"),
}


def _fields(config: RunConfig) -> list[Problem]:
    given = {path: config.at(path) for path in FIELDS}
    return [
        Problem(f"{path}={as_text(value)}", why, allowed.remedy.format(key=path))
        for path, value in given.items()
        for allowed, why in [FIELDS[path]]
        if not allowed.accepts(value)
    ]


def _others(config: RunConfig) -> Iterator[Problem]:
    """Yield what else a run cannot have beside FSDP."""
    if cuda_graphs.requested(config.model):
        yield Problem("", "FSDP is not covered with CUDA graphs", "cuda_graph=off")
    if finetuning.adapts(config):
        yield Problem("", "FSDP is not covered with adapters", "peft=none, or ddp.use_megatron_fsdp=false")
    if low_precision.adds_fp8(config):
        yield Problem("", "FSDP is not covered with FP8 and FP4", "precision=bf16")


def _unsaved(config: RunConfig) -> Problem | None:
    """Of no_shard, which Megatron-Core cannot save where it takes a layer's two matrices apart."""
    every = config.at("checkpoint.save_interval")
    text = "Megatron-Core cannot save gated layers of ddp.data_parallel_sharding_strategy=no_shard"
    unsaved = every and config.fsdp == STRATEGIES[0] and config.shape.gated
    return Problem(f"save={every}", text, "save=0, or ddp.use_megatron_fsdp=false") if unsaved else None


def _alone(config: RunConfig) -> Iterator[Problem]:
    """Yield settings that only FSDP reads."""
    if config.at("checkpoint.ckpt_format") == FSDP_FORMAT:
        yield Problem(
            f"checkpoint.ckpt_format={FSDP_FORMAT}", "only FSDP writes it", "checkpoint.ckpt_format=torch_dist"
        )
    if config.at("dist.use_megatron_fsdp"):
        yield Problem(
            "dist.use_megatron_fsdp=true", "Bridge sets ddp.use_megatron_fsdp, too", "ddp.use_megatron_fsdp=true"
        )
    for key in ("dist.use_torch_fsdp2", "ddp.use_custom_fsdp"):
        if config.at(key):
            yield Problem(f"{key}=true", "it is not covered", f"{key}=false, or ddp.use_megatron_fsdp=true instead")


RULES: tuple[Rule[RunConfig], ...] = (
    Rule(_fields, needs=lambda t: t.fsdp),
    Rule(_others, needs=lambda t: t.fsdp),
    Rule(_unsaved, needs=lambda t: t.fsdp),
    Rule(_alone, needs=lambda t: not t.fsdp),
)


# What the invariant modes cover.

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


INVARIANT_RULES: tuple[Rule[RunConfig], ...] = tuple(
    limit_of(needs, test, adjust=adjust)
    for test, needs, adjust in (
        (_limits, lambda t: t.fsdp, ()),
        (_without, lambda t: not t.fsdp, becomes("no_shard", _STRATEGY)),
        (_passes, lambda t: t.fsdp in ("optim_grads", "optim_grads_params"), ()),
    )
)
