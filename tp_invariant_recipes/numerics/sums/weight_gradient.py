"""Compute a weight gradient for autograd, or directly into Megatron's fp32 buffer.

A rank that holds the tokens of several context shards (numerics/sums/context_shards.py) has a gradient of each: the
first in `main_grad`, the others in `context_gradients`, which numerics/megatron/data_parallel.py gives a weight.

Where a backward pass is a leaf of the tree over data shards (numerics/sums/data_shards.py), it may add to each number
of a gradient only once, since (a + b) + c is not a + (b + c). Products, norms, biases and routers compute a whole
gradient before they add it; the embedding's rows are added up first. A second use of a weight in the pass would be a
second addition, and is an error.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.numerics.sums.tree import tree_sum

CONTEXTS = "context_gradients"  # attribute of a weight: gradients of the context shards after the first

LEAF = "backward_pass_is_a_leaf"  # attribute of a weight: a backward pass adds to each number of its gradient once

# (shape, dtype, device) -> a stand-in gradient; nobody reads it.
_stand_ins: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}


def forget_stand_ins() -> None:
    """Free their memory, one weight's, when a training has ended and another follows in the same process."""
    _stand_ins.clear()


def weight_gradient(weight: Tensor, *compute: Callable[[Tensor, bool], object]) -> Tensor:
    """Compute a weight's gradient and return the tensor that a backward pass gives to autograd for the weight.

    Without `weight.main_grad` it returns the gradient, rounded once to the weight's dtype. With it (Megatron's fp32
    buffer) it adds the gradient there unrounded and returns a stand-in, so that the hooks on the weight still run;
    `grad_added_to_main_grad` tells them to ignore the stand-in's value.

    compute: one for each context shard of this rank, called as compute(out, add) with an fp32 tensor of the weight's
             shape to fill or to add to.
    returns: the weight's shape and dtype.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        gradients = torch.empty(len(compute), *weight.shape, dtype=torch.float32, device=weight.device)
        for fill, gradient in zip(compute, gradients, strict=True):
            fill(gradient, False)
        return tree_sum(gradients, weight.dtype)
    for add_to, gradient in zip(compute, gradients_of(weight), strict=True):
        add_to(gradient, True)
    return added_to_main_grad(weight)


def added_by_itself(weight: Tensor) -> Tensor:
    """Return the weight, whose gradient is added to `main_grad` as soon as it is known.

    autograd would first add up, in the weight's dtype, what several uses of it in one backward pass give.
    """
    return _AddedByItself.apply(weight)


class _AddedByItself(LayerFunction):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        return weight_gradient(weight, lambda out, add: out.add_(gradients[0]) if add else out.copy_(gradients[0]))


def gradients_of(weight: Any) -> list[Tensor]:
    """Return the fp32 buffers of a weight's gradient, one for each context shard of this rank."""
    return [weight.main_grad, *getattr(weight, CONTEXTS, ())]


def is_leaf(weight: Tensor) -> bool:
    """Whether a backward pass may add to each number of this weight's gradient only once."""
    return getattr(weight, LEAF, False)


def _check_alone(weight: Any) -> None:
    """Raise RuntimeError at a second gradient of a weight in one backward pass."""
    backward = torch._C._current_graph_task_id()
    if backward >= 0 and getattr(weight, "latest_backward", -1) == backward:
        raise RuntimeError(
            f"a weight of shape {[*weight.shape]} got two gradients in one backward pass. "
            "With numerics.data_shards > dp they would be added in another order: set numerics.data_shards to dp"
        )
    weight.latest_backward = backward


def added_to_main_grad(weight: Tensor) -> Tensor:
    """Tell Megatron that `weight.main_grad` already contains the gradient.

    Raises RuntimeError at a second gradient of the weight in a backward pass that is a leaf.

    returns: a gradient that nobody reads; zeros where Megatron would add it (tied embeddings: `zero_out_wgrad`).
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if is_leaf(weight):
        _check_alone(weight)
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    key = (weight.shape, weight.dtype, weight.device)
    stand_in = _stand_ins.get(key)
    if stand_in is None:
        # There is one stand-in for each shape, and all share the memory of the largest so far.
        largest = max((s for s in _stand_ins.values() if s.dtype == weight.dtype and s.device == weight.device),
                      key=Tensor.numel, default=None)  # fmt: skip
        if largest is not None and largest.numel() >= weight.numel():
            stand_in = largest.view(-1)[: weight.numel()].view(weight.shape)
        else:
            stand_in = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        _stand_ins[key] = stand_in
    return stand_in.detach()  # autograd takes a gradient without copying it only if it holds the sole reference
