"""Megatron-Core does not sum the gradient of a gated delta net's last norm over tensor-parallel ranks."""

from collections.abc import Callable
from typing import Any

from tp_invariant_recipes.patches import code
from tp_invariant_recipes.patches.patch import Looks, Patch

WHY = (
    "with gated delta nets, tp > 1 and sp=false each rank keeps the gradient that its own heads give the norm of the "
    "output, so that ranks train different norms"
)


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


def not_summed() -> bool:
    """Whether the installed function knows norms of queries and keys alone."""
    reduced = code.source(
        "megatron.core", "distributed/finalize_model_grads.py", "_allreduce_non_tensor_model_parallel"
    )
    return "k_layernorm" in reduced and "out_norm" not in reduced


def delta_nets(config: Any) -> bool:
    """Whether a stock run has gated delta nets whose ranks have all tokens."""
    if config is None:
        return True
    split = config.layout.tp > 1 and not config.layout.sp
    return split and bool(config.model.get("linear_attention_freq")) and not config.numerics.invariant


PATCH = Patch(
    name="core-delta-net-norm",
    package="megatron-core",
    need=Looks(not_summed, "a finalize_model_grads without out_norm"),
    replaces={
        "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads": with_output_norms
    },
    why=WHY,
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/7452",
    concerns=delta_nets,
)
