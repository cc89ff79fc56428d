"""The experts: products of each expert's tokens with its weights. An expert's owner computes the same products, of the
same shapes, in every layout (numerics/token_dispatcher.py), so any deterministic product gives the same bits.

With ep > tp, weight gradients of further sources (data-parallel ranks) wait in separate memory until all micro-batches
are done. This keeps the order of layouts in which every data-parallel rank has the expert to itself: each rank first
sums its own gradients, then ranks are summed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.host.function_modes import outside_modes
from tp_invariant_recipes.kernels.grouped_product import Groups, grouped_product, grouped_weight_gradient
from tp_invariant_recipes.kernels.weighted_activation import weighted_activation, weighted_activation_backward
from tp_invariant_recipes.numerics.product import product
from tp_invariant_recipes.numerics.token_dispatcher import Batches
from tp_invariant_recipes.numerics.weight_gradient import added_to_main_grad

Weights = Sequence[Tensor]


def activation_kind(config: Any) -> str | None:
    """The name of the experts' activation in kernels/weighted_activation.py; None: that module lacks it."""
    from megatron.core.activations import squared_relu

    plain = config.activation_func_clamp_value is None and not config.glu_linear_offset
    kinds = {(torch.nn.functional.silu, True): "swiglu", (squared_relu, False): "squared_relu"}
    return kinds.get((config.activation_func, config.gated_linear_unit)) if plain else None


def expert_mlp(x: Tensor, probs: Tensor, batches: Batches, fc1: Weights, fc2: Weights, kind: str | None) -> Tensor:
    """fc2(activation(fc1(x)) · probs), each row with its expert's weights.

    x: [r, h], in order of batches; probs: [r]. fc1: [f or 2f, h] per local expert; fc2: [h, f] per local expert.
    returns: [r, h].
    """
    if kind is None:
        raise NotImplementedError("of activations only SwiGLU and squared ReLU have an invariant version for experts")
    inner = _GroupedLinear.apply(x, batches, *fc1)
    return _GroupedLinear.apply(_WeightedActivation.apply(inner, probs, kind), batches, *fc2)


class _WeightedActivation(torch.autograd.Function):
    @staticmethod
    @outside_modes
    def forward(ctx: Any, x: Tensor, probs: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x, probs)
        ctx.kind = kind
        return weighted_activation(x, probs, kind)

    @staticmethod
    @outside_modes
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, probs = ctx.saved_tensors
        return *weighted_activation_backward(gradients[0].contiguous(), x, probs, ctx.kind), None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    @outside_modes
    def forward(ctx: Any, x: Tensor, batches: Batches, *weights: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, *weights)
        ctx.batches = batches
        out = x.new_empty(len(x), weights[0].shape[0])
        return _rows(x, _of(batches, weights), out, batches.groups, transposed=True)

    @staticmethod
    @outside_modes
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        batches = ctx.batches
        dy = gradients[0].contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _rows(dy, _of(batches, weights), torch.empty_like(x), batches.groups, transposed=False)
        wanted = [w for w, needed in zip(weights, ctx.needs_input_grad[2:], strict=True) if needed]
        if wanted and len(wanted) < len(weights):
            raise NotImplementedError("either all of a layer's experts are trained or none")
        return (
            dx,
            None,
            *(_weight_gradients(dy, x, weights, batches) if wanted else [None] * len(weights)),
        )


def _of(batches: Batches, tensors: Weights) -> list[Tensor]:
    return [tensors[batches.expert(batch)] for batch in range(len(batches.groups.sizes))]


def _rows(x: Tensor, weights: Weights, out: Tensor, groups: Groups, *, transposed: bool) -> Tensor:
    if x.is_cuda:
        grouped_product(x, weights, out, groups, transposed=transposed)
        return out
    for rows, weight, part in zip(x.split(groups.sizes), weights, out.split(groups.sizes), strict=True):
        if len(rows):
            product(rows, weight.t() if transposed else weight, part)
    return out


def _weight_gradients(dy: Tensor, x: Tensor, weights: Weights, batches: Batches) -> list[Tensor]:
    """The gradient that autograd gets for every local expert; zeros for experts that other ranks compute."""
    groups = batches.groups
    if all(getattr(weight, "main_grad", None) is None for weight in weights):
        plain = torch.zeros(len(weights), *weights[0].shape, dtype=torch.float32, device=x.device)
        later = torch.zeros_like(plain) if batches.sources > 1 else plain
        _add(
            dy,
            x,
            [(later if batches.source(b) else plain)[batches.expert(b)] for b in range(len(groups.sizes))],
            groups,
        )
        total = plain + later if batches.sources > 1 else plain
        return list(total.to(weights[0].dtype))
    _add(dy, x, [_place(weights[batches.expert(b)], batches.source(b)) for b in range(len(groups.sizes))], groups)
    return [added_to_main_grad(weight) for weight in weights]


def _add(dy: Tensor, x: Tensor, outs: list[Tensor], groups: Groups) -> None:
    if x.is_cuda:
        grouped_weight_gradient(dy, x, outs, groups)
        return
    for grad, rows, out in zip(dy.split(groups.sizes), x.split(groups.sizes), outs, strict=True):
        if len(rows):
            product(grad.t(), rows, out, add=True)


def _place(weight: Any, source: int) -> Tensor:
    if source == 0:
        return weight.main_grad
    if getattr(weight, "second_source", None) is None:
        weight.second_source = torch.zeros_like(weight.main_grad)
    return weight.second_source


def add_second_sources(finish: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement for DistributedDataParallel.finish_grad_sync, which runs when all micro-batches are done.

    Megatron scales each data-parallel rank's gradients (by 1/dp) and then sums the ranks'. So a second source is scaled
    before it is added: (a + b) / 2 is not a/2 + b/2 where a half is subnormal.
    """

    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = [(bucket, bucket.gradient_scaling_factor) for bucket in _with_second_sources(self)]
        for bucket, factor in scaled:
            bucket.grad_data.mul_(factor)
            for weight in bucket.params_list:
                if getattr(weight, "second_source", None) is not None:
                    weight.main_grad.add_(weight.second_source.mul_(factor))
                    weight.second_source.zero_()
            bucket.gradient_scaling_factor = 1.0
        try:
            return finish(self, *args, **kwargs)
        finally:
            for bucket, factor in scaled:
                bucket.gradient_scaling_factor = factor

    return finish_grad_sync


def _with_second_sources(model: Any) -> list[Any]:
    """The buckets of Megatron's gradient buffers whose experts have gradients of two data-parallel ranks."""
    return [
        bucket
        for buffer in model.expert_parallel_buffers
        for bucket in buffer.buckets
        if any(getattr(weight, "second_source", None) is not None for weight in bucket.params_list)
    ]
