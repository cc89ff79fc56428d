"""Gradients, norms and losses that Megatron-Core sums over too few ranks, too often, or in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tp_invariant_recipes.patches.patch import Form, Looks, Patch

if TYPE_CHECKING:
    from tp_invariant_recipes.settings.run_config import RunConfig


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
    """Whether a stock run has multi-token prediction whose ranks have parts of a sequence."""
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


_ROW_PARALLEL = "megatron.core.tensor_parallel.layers:RowParallelLinear"
EXPERT_BIAS = Patch(
    name="core-expert-bias",
    package="megatron-core",
    need=Looks(
        Form("transformer/mlp.py", "forward", has="output += output_bias"),
        "an MLP that adds output_bias in place",
    ),
    replaces={f"{_ROW_PARALLEL}.forward": own_output},
    why="with model.transformer_impl=local experts with biases (GPT-OSS) end in autograd's error: Megatron-Core "
    "changes in place what a custom function has returned",
    reached=_local_experts_with_biases,
)
EXPERT_BIAS_SUM = Patch(
    name="core-expert-bias-sum",
    package="megatron-core",
    need=Looks(
        Form(
            "tensor_parallel/layers.py",
            "linear_with_grad_accumulation_and_async_allreduce",
            has='setattr(self.bias, "sequence_parallel", self.sequence_parallel)',
        ),
        "a RowParallelLinear that marks biases of experts",
    ),
    replaces={f"{_ROW_PARALLEL}.__init__": summed_once},
    why="with biases of experts, tp > 1, sp and etp=1 the biases of their second matrix get tp times their gradient: "
    "it is summed over tensor-parallel ranks after the sum over all ranks that have the expert",
    reached=lambda config: _local_experts_with_biases(config) and config.layout.sp and not config.numerics.invariant,
)
SINKS = Patch(
    name="core-sinks-norm",
    package="megatron-core",
    need=Looks(
        Form("transformer/dot_product_attention.py", "__init__", has="softmax_offset", lacks="tensor_model_parallel"),
        "a DotProductAttention that does not mark its sinks",
    ),
    replaces={"megatron.core.transformer.dot_product_attention:DotProductAttention.__init__": marked_as_split},
    why="with model.softmax_type=learnable and tp > 1 the norm that clips gradients has the sinks of the first "
    "tensor-parallel rank alone: Megatron-Core does not mark them as split",
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/7530",
    reached=split_sinks,
)
_REDUCED = "_allreduce_non_tensor_model_parallel"
DELTA_NET = Patch(
    name="core-delta-net-norm",
    package="megatron-core",
    need=Looks(
        Form("distributed/finalize_model_grads.py", _REDUCED, has="k_layernorm", lacks="out_norm"),
        "a finalize_model_grads without out_norm",
    ),
    replaces={f"megatron.core.distributed.finalize_model_grads:{_REDUCED}_grads": with_output_norms},
    why="with gated delta nets, tp > 1 and sp=false each rank keeps the gradient that its own heads give the norm of "
    "the output, so that ranks train different norms",
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/7452",
    reached=delta_nets,
)
MULTI_TOKEN = Patch(
    name="core-mtp-context",
    package="megatron-core",
    need=Looks(
        Form("transformer/multi_token_prediction.py", "process_mtp_loss", has="num_tokens", lacks="all_reduce"),
        "a process_mtp_loss that sums no tokens over context-parallel ranks",
    ),
    replaces={"megatron.core.transformer.multi_token_prediction:roll_tensor": over_the_sequence},
    why="with model.mtp_num_layers and cp > 1 tokens of a rank with fewer of them weigh more: Megatron-Core divides "
    "their losses by the rank's tokens, not by those of the sequence",
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/7498",
    reached=predicts_tokens_over_cp,
)
PATCHES = (EXPERT_BIAS, EXPERT_BIAS_SUM, SINKS, DELTA_NET, MULTI_TOKEN)
