# SPDX-License-Identifier: Apache-2.0
"""Patches of Megatron-Core: checkpoints, and gradients that it computes or adds wrongly.

Some checkpoints Megatron-Core cannot load, saves under other names, or starts a process for.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from tp_invariant_recipes import saved_names
from tp_invariant_recipes.patches.patch import Form, Patch
from tp_invariant_recipes.start import forking

if TYPE_CHECKING:
    from tp_invariant_recipes.settings.run_config import RunConfig


def queue_in_this_process(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a queue for a save within this process, or Megatron's shared one, whose manager ends with this process."""

    def get_write_results_queue(mp_mode: str | None = None) -> Any:
        from multiprocessing.managers import SyncManager

        from megatron.core.dist_checkpointing.strategies import filesystem_async

        if mp_mode is None and filesystem_async._results_queue is None:
            return queue.Queue()
        if filesystem_async._results_queue is None:
            manager = SyncManager(ctx=get_context(mp_mode))
            manager.start(forking.serve_starter)
            filesystem_async._results_queue = manager.Queue()
        return filesystem_async._results_queue

    return get_write_results_queue


def like_the_others(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ChainedOptimizer.sharded_state_dict: what an optimizer without parameters saves is true of all ranks.

    It takes the step of another optimizer of its kind, and its lists of parameters stay on this rank.
    """

    def sharded_state_dict(self: Any, model: Any, is_loading: bool = False, **kwargs: Any) -> Any:
        from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
        from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

        saved = original(self, model, is_loading, **kwargs)
        if len(self.chained_optimizers) == 1:
            return saved
        single = [
            (optimizer, saved[n])
            for n, optimizer in enumerate(self.chained_optimizers)
            if not hasattr(optimizer, "chained_optimizers")
        ]
        for optimizer, state in single:
            if any(group["params"] for group in optimizer.param_groups):
                continue
            for other, its in single:
                if type(other.optimizer) is type(optimizer.optimizer) and any(g["params"] for g in other.param_groups):
                    # Megatron has the step in each group or, of torch's optimizers, once for all parameters.
                    source = its.get("optimizer", its)
                    target = state.get("optimizer", state)
                    if "common_step" in source.get("state", {}):
                        target["state"]["common_step"] = source["state"]["common_step"]
                    steps = [group["step"] for group in source["param_groups"] if "step" in group]
                    for group in target["param_groups"] if steps else ():
                        group["step"] = steps[0]
            if "fp32_from_fp16_params" in state and not isinstance(self, LayerWiseDistributedOptimizer):
                state["fp32_from_fp16_params"] = LocalNonpersistentObject(state["fp32_from_fp16_params"])
        return saved

    return sharded_state_dict


def with_a_state(original: Callable[..., None]) -> Callable[..., None]:
    """Replace MegatronOptimizer.__init__: an optimizer without a function that makes its state gets SGD's."""

    def __init__(self: Any, optimizer: Any, config: Any, init_state_fn: Callable[..., None] | None = None) -> None:
        original(self, optimizer, config, init_state_fn or momentum)

    return __init__


def momentum(optimizer: Any, config: Any = None) -> None:
    """Make the buffers that torch's SGD makes in its first step. Without momentum, or of another optimizer, none."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))


def as_transformer_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace get_gpt_layer_local_submodules: checkpoints have the names of Transformer Engine's layers."""

    def get_gpt_layer_local_submodules(num_experts: int | None = None, *args: Any, **more: Any) -> Any:
        layer = original(num_experts, *args, **more)
        latent = not layer.sharded_state_dict_keys_map
        attention = saved_names.LATENT_ATTENTION if latent else saved_names.ATTENTION
        return replace(layer, sharded_state_dict_keys_map=attention | ({} if num_experts else saved_names.DENSE))

    return get_gpt_layer_local_submodules


_WRITER = "dist_checkpointing.strategies.filesystem_async"
SAVE = Patch(
    name="core-save-without-manager",
    versions="get_write_results_queue() that makes a Manager()",
    form=Form(f"{_WRITER.replace('.', '/')}.py", "get_write_results_queue", has="Manager()"),
    replaces={f"megatron.core.{_WRITER}:get_write_results_queue": queue_in_this_process},
    why="every save, even one within this process, starts a manager process; that takes seconds, and a killed rank "
    "leaves it behind with 0.3 GB",
)

CHECKPOINTS = (
    SAVE,
    Patch(
        name="core-empty-optimizer",
        versions="ChainedOptimizer that saves empty lists",
        form=Form(
            "optimizer/optimizer.py",
            "_split_state_dict",
            has="def sharded_state_dict",
            lacks="LocalNonpersistentObject",
        ),
        replaces={"megatron.core.optimizer.optimizer:ChainedOptimizer.sharded_state_dict": like_the_others},
        why="where a pipeline stage has no experts, its optimizer of experts has no parameters; Megatron-Core saves "
        "empty lists and no step for all stages, or expects them, and a run cannot continue",
        reached=lambda config: config.shape.experts,
    ),
    Patch(
        name="core-sgd-state",
        versions="an SGD with init_state_fn = None",
        form=Form(
            "optimizer/__init__.py",
            "_get_megatron_optimizer_based_on_param_groups",
            has="momentum=config.sgd_momentum,\n            )\n            init_state_fn = None",
        ),
        replaces={"megatron.core.optimizer.optimizer:MegatronOptimizer.__init__": with_a_state},
        why="with optimizer.optimizer=sgd a run cannot continue: Megatron-Core calls a function that makes the "
        "optimizer's state before it loads a checkpoint, and has none for SGD",
        reached=lambda config: config.section("optimizer").get("optimizer") == "sgd",
    ),
    Patch(
        name="core-local-names",
        versions="get_gpt_layer_local_submodules() with one sharded_state_dict_keys_map",
        form=Form(
            "models/gpt/gpt_layer_specs.py", "get_gpt_layer_local_submodules", has="sharded_state_dict_keys_map={"
        ),
        replaces={"megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_submodules": as_transformer_engine},
        why="with model.transformer_impl=local Megatron-Core saves norms of experts' layers and of MLA "
        "under other names than with Transformer Engine's layers, so that neither reads the other's checkpoints",
    ),
)


def own_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace RowParallelLinear.forward: an expert with a bias returns a tensor of its own, which may be changed."""

    def forward(self: Any, input_: Any) -> Any:
        output, bias = original(self, input_)
        return (output if bias is None or not self.is_expert else output.clone()), bias

    return forward


def summed_once(original: Callable[..., None]) -> Callable[..., None]:
    """Replace RowParallelLinear.__init__: sequence parallelism does not sum the bias of an expert."""

    def __init__(self: Any, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        if self.is_expert and self.bias is not None and self.tp_group.size() == 1:
            self.bias.sequence_parallel = False

    return __init__


def _local_experts_with_biases(config: RunConfig) -> bool:
    return bool(config.shape.experts) and config.shape.biased and config.model["transformer_impl"] == "local"


def marked_as_split(original: Callable[..., None]) -> Callable[..., None]:
    """Replace DotProductAttention.__init__: the sinks are split over the ranks, along their only dimension."""

    def __init__(self: Any, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        if getattr(self.softmax_offset, "requires_grad", False):
            self.softmax_offset.tensor_model_parallel = True

    return __init__


def with_output_norms(original: Callable[..., None]) -> Callable[..., None]:
    """Replace _allreduce_non_tensor_model_parallel_grads: the gradients of `out_norm` are summed, too."""

    def reduce(model: Any, config: Any, tp_group: Any = None) -> None:
        import torch
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        original(model, config, tp_group)
        for name, parameter in (each for chunk in model for each in chunk.named_parameters()):
            if ".out_norm." in name and parameter.requires_grad and not config.sequence_parallel:
                torch.distributed.all_reduce(parameter.main_grad, group=tp_group or get_tensor_model_parallel_group())

    return reduce


def delta_nets(config: RunConfig) -> bool:
    """Whether a stock run has gated delta nets whose ranks have all tokens."""
    split = config.layout.tp > 1 and not config.layout.sp
    return split and bool(config.model.get("linear_attention_freq")) and not config.numerics.invariant


def split_sinks(config: RunConfig) -> bool:
    """Whether tensor-parallel ranks hold different attention sinks."""
    return config.model.get("softmax_type") == "learnable" and config.layout.tp > 1


def predicts_tokens_over_cp(config: RunConfig) -> bool:
    """Whether a stock run has MTP whose ranks have parts of a sequence."""
    return bool(config.shape.depths and config.layout.cp > 1 and not config.numerics.invariant)


def over_the_sequence(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace multi_token_prediction.roll_tensor: the sum that it returns is the mean of all context-parallel ranks.

    Gradients are averaged over these ranks later, so that a loss divided by the mean is one divided by all tokens.
    """

    def roll_tensor(tensor: Any, *args: Any, cp_group: Any = None, **more: Any) -> Any:
        import torch

        rolled, total = original(tensor, *args, cp_group=cp_group, **more)
        if total is not None and cp_group is not None and cp_group.size() > 1:
            total = total.float()
            torch.distributed.all_reduce(total, group=cp_group)
            total /= cp_group.size()
        return rolled, total

    return roll_tensor


def gathered_again(original: Callable[..., None]) -> Callable[..., None]:
    """Replace start_param_sync of a group of buckets: a forward pass gathers weights that were gathered before it."""

    def start_param_sync(self: Any, force_sync: bool = False) -> None:
        original(self, force_sync)
        if force_sync and self.ddp_config.overlap_param_gather:
            self.param_gather_dispatched = False

    return start_param_sync


_ROW_PARALLEL = "megatron.core.tensor_parallel.layers:RowParallelLinear"
EXPERT_BIAS = Patch(
    name="core-expert-bias",
    versions="an MLP that adds output_bias in place",
    form=Form("transformer/mlp.py", "forward", has="output += output_bias"),
    replaces={f"{_ROW_PARALLEL}.forward": own_output},
    why="with model.transformer_impl=local experts with biases (GPT-OSS) end in autograd's error: Megatron-Core "
    "changes in place what a custom function has returned",
    reached=_local_experts_with_biases,
)
EXPERT_BIAS_SUM = Patch(
    name="core-expert-bias-sum",
    versions="a RowParallelLinear that marks biases of experts",
    form=Form(
        "tensor_parallel/layers.py",
        "linear_with_grad_accumulation_and_async_allreduce",
        has='setattr(self.bias, "sequence_parallel", self.sequence_parallel)',
    ),
    replaces={f"{_ROW_PARALLEL}.__init__": summed_once},
    why="with biases of experts, tp > 1, sp and etp=1 the biases of their second matrix get tp times their gradient: "
    "it is summed over tensor-parallel ranks after the sum over all ranks that have the expert",
    reached=lambda config: _local_experts_with_biases(config) and config.layout.sp and not config.numerics.invariant,
)
SINKS = Patch(
    name="core-sinks-norm",
    versions="a DotProductAttention that does not mark its attention sinks",
    form=Form("transformer/dot_product_attention.py", "__init__", has="softmax_offset", lacks="tensor_model_parallel"),
    replaces={"megatron.core.transformer.dot_product_attention:DotProductAttention.__init__": marked_as_split},
    why="with model.softmax_type=learnable and tp > 1 the norm that clips gradients has the attention sinks "
    "of the first tensor-parallel rank alone: Megatron-Core does not mark them as split",
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/7530",
    reached=split_sinks,
)
_REDUCED = "_allreduce_non_tensor_model_parallel"
DELTA_NET = Patch(
    name="core-delta-net-norm",
    versions="a finalize_model_grads without out_norm",
    form=Form("distributed/finalize_model_grads.py", _REDUCED, has="k_layernorm", lacks="out_norm"),
    replaces={f"megatron.core.distributed.finalize_model_grads:{_REDUCED}_grads": with_output_norms},
    why="with gated delta nets, tp > 1 and sp=false each rank keeps the gradient that its own heads give the norm of "
    "the output, so that ranks train different norms",
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/7452",
    reached=delta_nets,
)
MULTI_TOKEN = Patch(
    name="core-mtp-context",
    versions="a process_mtp_loss that sums no tokens over context-parallel ranks",
    form=Form("transformer/multi_token_prediction.py", "process_mtp_loss", has="num_tokens", lacks="all_reduce"),
    replaces={"megatron.core.transformer.multi_token_prediction:roll_tensor": over_the_sequence},
    why="with model.mtp_num_layers and cp > 1 tokens of a rank with fewer of them weigh more: Megatron-Core divides "
    "their losses by the rank's tokens, not by those of the sequence",
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/7498",
    reached=predicts_tokens_over_cp,
)
GATHERS = Patch(
    name="core-gathers-in-graphs",
    versions="a start_param_sync that marks weights as gathered",
    form=Form("distributed/param_and_grad_buffer.py", "start_param_sync", has="self.param_gather_dispatched = True"),
    replaces={
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_param_sync": gathered_again
    },
    why="with ddp.overlap_param_gather and a CUDA graph of the whole step, a graph that is captured after an "
    "evaluation, a checkpoint or digests has no gathers, so that ranks go on with weights of that step",
    reached=lambda config: (
        config.at("ddp.overlap_param_gather") and config.model.get("cuda_graph_impl") == "full_iteration"
    ),
)
GRADIENTS = (EXPERT_BIAS, EXPERT_BIAS_SUM, SINKS, DELTA_NET, MULTI_TOKEN, GATHERS)
