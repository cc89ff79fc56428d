"""Megatron-Core adds an expert's bias in place to what its own row-parallel layer returns, which may be a view."""

from collections.abc import Callable
from typing import Any

from tp_invariant_recipes.patches import code
from tp_invariant_recipes.patches.patch import Looks, Patch

WHY = (
    "with model.transformer_impl=local experts with biases (GPT-OSS) end in autograd's error: Megatron-Core changes in "
    "place what a custom function has returned"
)


def own_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace RowParallelLinear.forward: an expert with a bias returns a tensor of its own."""

    def forward(self: Any, input_: Any) -> Any:
        output, bias = original(self, input_)
        return (output if bias is None or not self.is_expert else output.clone()), bias

    return forward


def in_place() -> bool:
    """Whether the installed MLP adds the bias in place."""
    return "output += output_bias" in code.source("megatron.core", "transformer/mlp.py", "forward")


def _local_experts_with_biases(config: Any) -> bool:
    return bool(config.shape.experts) and config.shape.biased and config.model["transformer_impl"] == "local"


PATCH = Patch(
    name="core-expert-bias",
    package="megatron-core",
    need=Looks(in_place, "an MLP that adds output_bias in place"),
    replaces={"megatron.core.tensor_parallel.layers:RowParallelLinear.forward": own_output},
    why=WHY,
    concerns=lambda config: config is None or _local_experts_with_biases(config),
)

TWICE = (
    "with biases of experts, tp > 1, sp and etp=1 the biases of their second matrix get tp times their gradient: it is "
    "summed over tensor-parallel ranks after the sum over all ranks that have the expert"
)


def summed_once(original: Callable[..., None]) -> Callable[..., None]:
    """Replace RowParallelLinear.__init__: sequence parallelism does not sum the bias of an expert."""

    def __init__(self: Any, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        if self.is_expert and self.bias is not None and self.tp_group.size() == 1:
            self.bias.sequence_parallel = False

    return __init__


def marked_twice() -> bool:
    """Whether the installed row-parallel layer marks every bias for sequence parallelism."""
    return 'setattr(self.bias, "sequence_parallel", self.sequence_parallel)' in code.source(
        "megatron.core", "tensor_parallel/layers.py", "linear_with_grad_accumulation_and_async_allreduce"
    )


TWICE_PATCH = Patch(
    name="core-expert-bias-sum",
    package="megatron-core",
    need=Looks(marked_twice, "a RowParallelLinear that marks biases of experts"),
    replaces={"megatron.core.tensor_parallel.layers:RowParallelLinear.__init__": summed_once},
    why=TWICE,
    concerns=lambda config: (
        config is None or (_local_experts_with_biases(config) and config.layout.sp and not config.numerics.invariant)
    ),
)
