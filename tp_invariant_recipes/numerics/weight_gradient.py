"""Where a weight gradient goes: to autograd, or straight into Megatron's fp32 buffer."""

import torch
from torch import Tensor


def deliver_weight_gradient(weight: Tensor, gradient_fp32: Tensor) -> Tensor:
    """What a backward pass returns to autograd for `weight`.

    Without `weight.main_grad` that is the gradient, rounded once to the weight's dtype. With it (Megatron's buffer)
    the gradient is added there unrounded, and zeros of the weight's dtype are returned, so that the hooks on the
    weight still fire: `grad_added_to_main_grad` tells them to leave the value alone.

    gradient_fp32: the weight's shape, fp32.
    returns:       the weight's shape and dtype.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return gradient_fp32.to(weight.dtype)
    main_grad.add_(gradient_fp32)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros_like(weight)
