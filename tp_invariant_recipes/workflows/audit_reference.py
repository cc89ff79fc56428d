"""The reference of an audit: what of a configuration must not matter, set to the simplest there is."""

from typing import Any

from tp_invariant_recipes.config.overrides import Override, given
from tp_invariant_recipes.settings import layout
from tp_invariant_recipes.settings.run_config import RunConfig

# Field -> the value that needs no other rank, graph, overlap or fusion. A field that a configuration lacks stays unset.
SIMPLEST: dict[str, Any] = {
    "model.tensor_model_parallel_size": 1,
    "model.pipeline_model_parallel_size": 1,
    "model.virtual_pipeline_model_parallel_size": None,
    "model.pipeline_model_parallel_layout": None,
    "model.num_layers_in_first_pipeline_stage": None,
    "model.num_layers_in_last_pipeline_stage": None,
    "model.account_for_embedding_in_pipeline_split": False,
    "model.account_for_loss_in_pipeline_split": False,
    "model.context_parallel_size": 1,
    "model.expert_model_parallel_size": 1,
    "model.expert_tensor_parallel_size": 1,
    "parallel.data_parallel_size": 1,
    "train.micro_batch_size": 1,
    "model.cuda_graph_impl": "none",
    "model.recompute_granularity": None,
    "model.recompute_method": None,
    "model.recompute_num_layers": None,
    "model.recompute_modules": None,
    "model.tp_comm_overlap": False,
    "model.overlap_p2p_comm": False,
    "model.overlap_moe_expert_parallel_comm": False,
    "model.moe_shared_expert_overlap": False,
    "model.delay_wgrad_compute": False,
    "model.gradient_accumulation_fusion": False,
    "model.bias_activation_fusion": False,
    "model.bias_dropout_fusion": False,
    "model.masked_softmax_fusion": False,
    "model.apply_rope_fusion": False,
    "model.cross_entropy_loss_fusion": False,
    "model.moe_permute_fusion": False,
    "model.moe_router_fusion": False,
    "ddp.overlap_grad_reduce": False,
    "ddp.overlap_param_gather": False,
    "optimizer.overlap_param_gather": False,
}


def overrides(config: RunConfig, own: list[Override], degree: int = 1) -> list[str]:
    """The overrides that turn a configuration into its reference.

    own:    what --reference says, which comes later and so counts.
    degree: tensor-parallel ranks of the reference, and expert-parallel ones of a model with experts.
    """
    split = {"model.tensor_model_parallel_size": degree}
    if config.model.get("num_moe_experts"):
        split["model.expert_model_parallel_size"] = degree
    found = []
    for path, value in (SIMPLEST | split).items():
        section, _, name = path.partition(".")
        now = layout.of(config).dp if section == "parallel" else config.section(section).get(name)
        if now in (value, None) or given(own, path) is not None:
            continue
        text = "null" if value is None else str(value).lower()
        found.append("cuda_graph=off" if name == "cuda_graph_impl" else f"{path}={text}")
    if degree == 1 and config.model.get("sequence_parallel") and given(own, "model.sequence_parallel") is None:
        found.append("sp=false")
    return found
