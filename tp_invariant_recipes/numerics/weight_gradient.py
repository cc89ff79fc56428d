"""Where a weight gradient goes: to autograd, or straight into Megatron's fp32 buffer."""

from collections.abc import Callable

import torch
from torch import Tensor

# (dtype, device) -> memory that every stand-in gradient is a view of; nobody reads it.
_stand_in: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def weight_gradient(weight: Tensor, compute: Callable[[Tensor, bool], object]) -> Tensor:
    """Compute a weight's gradient where it belongs; what a backward pass returns to autograd for the weight.

    Without `weight.main_grad` that is the gradient, rounded once to the weight's dtype. With it (Megatron's fp32
    buffer) the gradient is added there unrounded, and a stand-in is returned, so that the hooks on the weight still
    fire: `grad_added_to_main_grad` tells them to leave its value alone.

    compute: called as compute(out, add) with an fp32 tensor of the weight's shape to fill or to add to.
    returns: the weight's shape and dtype.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        gradient = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        compute(gradient, False)
        return gradient.to(weight.dtype)
    compute(main_grad, True)
    return added_to_main_grad(weight)


def added_to_main_grad(weight: Tensor) -> Tensor:
    """Tell Megatron that the gradient is in `weight.main_grad` already.

    returns: a gradient that nobody reads; zeros where Megatron would add it (tied embeddings: `zero_out_wgrad`).
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    key = (weight.dtype, weight.device)
    memory = _stand_in.get(key)
    if memory is None or memory.numel() < weight.numel():
        memory = _stand_in[key] = torch.empty(weight.numel(), dtype=weight.dtype, device=weight.device)
    return memory[: weight.numel()].view(weight.shape)
