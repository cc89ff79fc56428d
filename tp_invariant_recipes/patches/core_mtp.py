"""Megatron-Core divides the losses of multi-token prediction by the tokens of one context-parallel rank."""

from collections.abc import Callable
from typing import Any

from tp_invariant_recipes.patches import code
from tp_invariant_recipes.patches.patch import Looks, Patch

WHY = (
    "with model.mtp_num_layers and cp > 1 tokens of a rank with fewer of them weigh more: Megatron-Core divides their "
    "losses by the rank's tokens, not by those of the sequence"
)


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


def of_a_rank() -> bool:
    """Whether the installed loss sums no tokens over ranks."""
    loss = code.source("megatron.core", "transformer/multi_token_prediction.py", "process_mtp_loss")
    return "num_tokens" in loss and "all_reduce" not in loss


PATCH = Patch(
    name="core-mtp-context",
    package="megatron-core",
    need=Looks(of_a_rank, "a process_mtp_loss that sums no tokens over context-parallel ranks"),
    replaces={"megatron.core.transformer.multi_token_prediction:roll_tensor": over_the_sequence},
    why=WHY,
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/7498",
    concerns=lambda config: (
        config is None or bool(config.shape.depths and config.layout.cp > 1 and not config.numerics.invariant)
    ),
)
