# SPDX-License-Identifier: Apache-2.0
"""The reference of an audit: what of a configuration must not matter, set to the simplest there is."""

from typing import Any

from tp_invariant_recipes.config.overrides import Override, given
from tp_invariant_recipes.fields.field import as_text
from tp_invariant_recipes.settings.run_config import COMBINED, OVERLAPS, RunConfig

_FUSED = (
    *("gradient_accumulation", "bias_activation", "bias_dropout", "masked_softmax", "apply_rope"),
    *("cross_entropy_loss", "moe_permute", "moe_router"),
)
# Field -> the value that needs no other rank, graph, overlap or fusion. A field that a configuration lacks stays unset.
SIMPLEST: dict[str, Any] = {
    **dict.fromkeys(("model.tensor_model_parallel_size", "model.pipeline_model_parallel_size"), 1),
    **dict.fromkeys(("model.virtual_pipeline_model_parallel_size", "model.pipeline_model_parallel_layout")),
    **dict.fromkeys(("model.num_layers_in_first_pipeline_stage", "model.num_layers_in_last_pipeline_stage")),
    "model.account_for_embedding_in_pipeline_split": False,
    "model.account_for_loss_in_pipeline_split": False,
    **dict.fromkeys(("model.context_parallel_size", "model.expert_model_parallel_size"), 1),
    **dict.fromkeys(("model.expert_tensor_parallel_size", "parallel.data_parallel_size", "train.micro_batch_size"), 1),
    "model.cuda_graph_impl": "none",
    **dict.fromkeys(f"model.recompute_{name}" for name in ("granularity", "method", "num_layers", "modules")),
    **dict.fromkeys(("model.tp_comm_overlap", "model.overlap_p2p_comm"), False),
    **{"model.moe_shared_expert_overlap": False, f"model.{COMBINED}": False, f"{OVERLAPS}.{COMBINED}": None},
    **{f"model.{name}_fusion": False for name in _FUSED},
    "ddp.use_megatron_fsdp": False,
    "ddp.data_parallel_sharding_strategy": "no_shard",
    **dict.fromkeys(("ddp.overlap_grad_reduce", "ddp.overlap_param_gather", "optimizer.overlap_param_gather"), False),
}


def overrides(config: RunConfig, own: list[Override], degree: int = 1) -> list[str]:
    """Return the overrides that turn a configuration into its reference.

    own:    what --reference says, which comes later and so counts.
    degree: tensor-parallel ranks of the reference, and expert-parallel ones of a model with experts.
    """
    split: dict[str, Any] = {"model.tensor_model_parallel_size": degree}
    if config.shape.experts:
        split["model.expert_model_parallel_size"] = degree
    if "|" in config.shape.pattern:
        split["model.hybrid_layer_pattern"] = config.shape.pattern.replace("|", "")
    needed = []
    for path, value in (SIMPLEST | split).items():
        section, _, name = path.partition(".")
        now = config.layout.dp if section == "parallel" else config.section(section).get(name)
        if now in (value, None) or given(own, path) is not None:
            continue
        needed.append("cuda_graph=off" if name == "cuda_graph_impl" else f"{path}={as_text(value)}")
    counts = {"data_shards": config.layout.dp, "context_shards": config.layout.cp, "expert_groups": 1}
    for name, number in counts.items() if config.numerics.invariant else ():  # they choose the definition
        shards = getattr(config.numerics, name) or number
        if shards > 1 and given(own, f"numerics.{name}") is None:
            needed.append(f"numerics.{name}={shards}")
    if degree == 1 and config.model.get("sequence_parallel") and given(own, "model.sequence_parallel") is None:
        needed.append("sp=false")
    return needed
