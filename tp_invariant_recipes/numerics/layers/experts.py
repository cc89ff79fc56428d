"""The experts: products of each expert's tokens with its weights. An expert's owner computes the same products, of the
same shapes, in every layout (numerics/layers/token_dispatcher.py), so any deterministic product gives the same bits. On
a GPU they are defined products like all others, by kernels/grouped_product.py.

An owner has the tokens of several context shards, and with ep > tp of several data-parallel ranks: its sources. Each
source has memory of its own for weight gradients, until all micro-batches are done. Then the trees add them that add
data-parallel ranks and context shards elsewhere: the sources of an owner are consecutive ranks, a subtree.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tp_invariant_recipes.host.function_modes import outside_modes
from tp_invariant_recipes.kernels.grouped_product import Groups, grouped_product, grouped_weight_gradient
from tp_invariant_recipes.kernels.weighted_activation import weighted_activation, weighted_activation_backward
from tp_invariant_recipes.numerics.layers.token_dispatcher import Batches
from tp_invariant_recipes.numerics.products.product import product
from tp_invariant_recipes.numerics.sums.tree import tree_sum
from tp_invariant_recipes.numerics.sums.weight_gradient import added_to_main_grad, gradients_of

Weights = Sequence[Tensor]


def mark_separate(experts: torch.nn.Module) -> None:
    """Give these weights buffers and an optimizer apart from all else in every layout.

    Megatron does so where tp > 1 or ep > 1. At tp=1 ep=1 it would write one optimizer's state into a checkpoint, which
    no other layout reads (`ChainedOptimizer.sharded_state_dict` of Megatron-Core). The groups of ranks that
    reduce both are the same there.
    """
    for weight in experts.parameters():
        weight.allreduce = False  # type: ignore[attr-defined]


class Arithmetic(NamedTuple):
    """What computes on a CPU: product as of numerics/products/product.py; activation and its backward as of
    kernels/weighted_activation.py, on every device."""

    product: Callable[..., Tensor]
    activation: Callable[[Tensor, Tensor, str], Tensor]
    activation_backward: Callable[[Tensor, Tensor, Tensor, str], tuple[Tensor, Tensor]]


OF_TREE = Arithmetic(product, weighted_activation, weighted_activation_backward)

LATER = "later_sources"  # attribute of a weight: gradients of the sources after the first data-parallel rank's


def activation_kind(config: Any) -> str | None:
    """The name of the experts' activation in kernels/weighted_activation.py; None: that module lacks it."""
    from megatron.core.activations import squared_relu

    plain = config.activation_func_clamp_value is None and not config.glu_linear_offset
    kinds = {(torch.nn.functional.silu, True): "swiglu", (squared_relu, False): "squared_relu"}
    return kinds.get((config.activation_func, config.gated_linear_unit)) if plain else None


def expert_mlp(
    x: Tensor,
    probs: Tensor,
    batches: Batches,
    fc1: Weights,
    fc2: Weights,
    kind: str | None,
    arithmetic: Arithmetic = OF_TREE,
) -> Tensor:
    """fc2(activation(fc1(x)) · probs), each row with its expert's weights.

    x: [r, h], in order of batches; probs: [r]. fc1: [f or 2f, h] per local expert; fc2: [h, f] per local expert.
    returns: [r, h].
    """
    if kind is None:
        raise NotImplementedError("of activations only SwiGLU and squared ReLU have an invariant version for experts")
    inner = _GroupedLinear.apply(x, batches, arithmetic, *fc1)
    return _GroupedLinear.apply(_WeightedActivation.apply(inner, probs, kind, arithmetic), batches, arithmetic, *fc2)


class _WeightedActivation(torch.autograd.Function):
    @staticmethod
    @outside_modes
    def forward(ctx: Any, x: Tensor, probs: Tensor, kind: str, arithmetic: Arithmetic) -> Tensor:
        ctx.save_for_backward(x, probs)
        ctx.kind, ctx.arithmetic = kind, arithmetic
        return arithmetic.activation(x, probs, kind)

    @staticmethod
    @outside_modes
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, probs = ctx.saved_tensors
        return *ctx.arithmetic.activation_backward(gradients[0].contiguous(), x, probs, ctx.kind), None, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    @outside_modes
    def forward(ctx: Any, x: Tensor, batches: Batches, arithmetic: Arithmetic, *weights: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, *weights)
        ctx.batches, ctx.arithmetic = batches, arithmetic
        out = x.new_empty(len(x), weights[0].shape[0])
        return _rows(x, _of(batches, weights), out, batches.groups, arithmetic, transposed=True)

    @staticmethod
    @outside_modes
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        batches = ctx.batches
        dy = gradients[0].contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _rows(dy, _of(batches, weights), torch.empty_like(x), batches.groups, ctx.arithmetic, transposed=False)
        wanted = [w for w, needed in zip(weights, ctx.needs_input_grad[3:], strict=True) if needed]
        if wanted and len(wanted) < len(weights):
            raise NotImplementedError("either all of a layer's experts are trained or none")
        return (
            dx,
            None,
            None,
            *(_weight_gradients(dy, x, weights, batches, ctx.arithmetic) if wanted else [None] * len(weights)),
        )


def _of(batches: Batches, tensors: Weights) -> list[Tensor]:
    return [tensors[batches.expert(batch)] for batch in range(len(batches.groups.sizes))]


def _rows(
    x: Tensor, weights: Weights, out: Tensor, groups: Groups, arithmetic: Arithmetic, *, transposed: bool
) -> Tensor:
    if x.is_cuda:
        grouped_product(x, weights, out, groups, transposed=transposed)
        return out
    for rows, weight, part in zip(x.split(groups.sizes), weights, out.split(groups.sizes), strict=True):
        if len(rows):
            arithmetic.product(rows, weight.t() if transposed else weight, part)
    return out


def _weight_gradients(
    dy: Tensor, x: Tensor, weights: Weights, batches: Batches, arithmetic: Arithmetic
) -> list[Tensor]:
    """The gradient that autograd gets for every local expert; zeros for experts that other ranks compute."""
    groups = batches.groups
    if all(getattr(weight, "main_grad", None) is None for weight in weights):
        plain = torch.zeros(batches.sources, len(weights), *weights[0].shape, dtype=torch.float32, device=x.device)
        _add(dy, x, [plain[batches.source(b), batches.expert(b)] for b in range(len(groups.sizes))], groups, arithmetic)
        return list(tree_sum(plain, weights[0].dtype))
    _add(
        dy,
        x,
        [_place(weights[batches.expert(b)], batches.source(b)) for b in range(len(groups.sizes))],
        groups,
        arithmetic,
    )
    return [added_to_main_grad(weight) for weight in weights]


def _add(dy: Tensor, x: Tensor, outs: list[Tensor], groups: Groups, arithmetic: Arithmetic) -> None:
    if x.is_cuda:
        grouped_weight_gradient(dy, x, outs, groups)
        return
    for grad, rows, out in zip(dy.split(groups.sizes), x.split(groups.sizes), outs, strict=True):
        if len(rows):
            arithmetic.product(grad.t(), rows, out, add=True)


def _place(weight: Any, source: int) -> Tensor:
    first = gradients_of(weight)
    if source < len(first):
        return first[source]
    later = getattr(weight, LATER, None)
    if later is None:
        later = []
        setattr(weight, LATER, later)
    while len(later) <= source - len(first):
        later.append(torch.zeros_like(weight.main_grad))
    return later[source - len(first)]


@torch.no_grad()
def add_later_sources(weight: Any, factor: float) -> None:
    """Add the other data-parallel ranks' sources of a weight to the first's in tree order, and begin them anew.

    factor: that the first's have been scaled by. Each source is scaled before it is added: (a + b) / 2 is not
            a/2 + b/2 where a half is subnormal.
    """
    first, later = gradients_of(weight), getattr(weight, LATER)
    if factor != 1.0:
        torch._foreach_mul_(later, factor)
    ranks = [first, *(later[start : start + len(first)] for start in range(0, len(later), len(first)))]
    while len(ranks) > 1:
        for left, right in zip(ranks[::2], ranks[1::2], strict=True):
            torch._foreach_add_(left, right)
        ranks = ranks[::2]
    torch._foreach_zero_(later)
