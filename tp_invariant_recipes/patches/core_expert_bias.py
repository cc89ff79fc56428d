"""Megatron-Core adds an expert's bias in place to what its own row-parallel layer returns, which may be a view."""

from collections.abc import Callable
from typing import Any

from tp_invariant_recipes.patches import code
from tp_invariant_recipes.patches.patch import Looks, Patch
from tp_invariant_recipes.replacement import Replacement

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
    model = config.model
    return bool(model.get("num_moe_experts") and model.get("add_bias_linear")) and model["transformer_impl"] == "local"


PATCH = Patch(
    name="core-expert-bias",
    package="megatron-core",
    need=Looks(in_place, "an MLP that adds output_bias in place"),
    replacements=(Replacement("megatron.core.tensor_parallel.layers:RowParallelLinear.forward", own_output, WHY),),
    why=WHY,
    concerns=lambda config: config is None or _local_experts_with_biases(config),
)
