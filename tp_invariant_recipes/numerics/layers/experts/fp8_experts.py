"""Experts in FP8: numerics/layers/experts/experts.py with operands of numerics/layers/linear/fp8_linear.py.

Batches are the tokens of one expert from one source, a context shard of a sequence, in every layout. So tensorwise each
batch has a scale of its own, and blockwise its tokens are filled up to a multiple of 128 with zeros, which add nothing.
An expert's weights lie whole with its owner.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import outside_modes
from tp_invariant_recipes.kernels.products.grouped_product import Groups
from tp_invariant_recipes.kernels.products.quantize import of_groups
from tp_invariant_recipes.kernels.products.quantized import BLOCK, E4M3, Quantized
from tp_invariant_recipes.numerics.layers.experts import experts
from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import Batches
from tp_invariant_recipes.numerics.layers.linear import fp8_weights
from tp_invariant_recipes.numerics.layers.linear.fp8_linear import Scaling
from tp_invariant_recipes.numerics.layers.linear.fp8_weights import Fp8Weight
from tp_invariant_recipes.numerics.products import fp8, quantize


def grouped_linear(x: Tensor, batches: Batches, scaling: Scaling, weights: Sequence[Tensor]) -> Tensor:
    """x @ weight^T, each row with its expert's weight. x: [r, k] in order of batches; weights: [n, k] per expert."""
    kept = [fp8_weights.quantized(weight, scaling.blockwise, None) for weight in weights]
    return _GroupedLinear.apply(x, batches, scaling, kept, *weights)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    @outside_modes
    def forward(
        ctx: Any, x: Tensor, batches: Batches, scaling: Scaling, kept: list[Fp8Weight], *weights: Tensor
    ) -> Tensor:
        x = x.contiguous()
        q = _rows(x, batches.groups, scaling, E4M3)
        ctx.save_for_backward(*((x,) if scaling.blockwise else (q.data, q.scale)), *weights)
        ctx.batches, ctx.scaling, ctx.fp8_weights = batches, scaling, kept
        out = x.new_empty(len(x), weights[0].shape[0])
        fp8.grouped_product(q, [weight.rows for weight in experts.of_batches(batches, kept)], out, batches.groups)
        return out

    @staticmethod
    @outside_modes
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        batches, scaling = ctx.batches, ctx.scaling
        count = 1 if scaling.blockwise else 2
        inputs, weights = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        dy = gradients[0].contiguous()
        q = _rows(dy, batches.groups, scaling, scaling.gradients)
        dx = None
        if ctx.needs_input_grad[0]:
            columns = [weight.of_backward() for weight in ctx.fp8_weights]
            dx = dy.new_empty(len(dy), weights[0].shape[1])
            fp8.grouped_product(q, experts.of_batches(batches, columns), dx, batches.groups)
        if not any(ctx.needs_input_grad[4:]):
            return (dx, *[None] * (3 + len(weights)))
        if scaling.blockwise:
            groups = _filled(batches.groups)
            dy_columns, x_columns = (
                quantize.along_columns(_spread(rows, batches.groups, groups), dtype)
                for rows, dtype in ((dy, scaling.gradients), (inputs[0], E4M3))
            )
        else:
            groups = batches.groups
            dy_columns, x_columns = quantize.transposed(q), quantize.transposed(Quantized(*inputs))

        def add(outs: list[Tensor]) -> None:
            fp8.grouped_weight_gradient(dy_columns, x_columns, outs, groups, batches.chain)

        return (dx, None, None, None, *experts.weight_gradients(add, weights, batches, dy.device))


def _rows(x: Tensor, groups: Groups, scaling: Scaling, dtype: torch.dtype) -> Quantized:
    return quantize.along_rows(x, dtype) if scaling.blockwise else of_groups(x, groups.counts, dtype)


def _filled(groups: Groups) -> Groups:
    """The groups with a multiple of 128 rows each."""
    return Groups(
        tuple(-(-size // BLOCK) * BLOCK for size in groups.sizes),
        torch.div(groups.counts + BLOCK - 1, BLOCK, rounding_mode="floor") * BLOCK,
    )


def _spread(x: Tensor, groups: Groups, filled: Groups) -> Tensor:
    """x with rows of zeros at the end of every group."""
    shift = (filled.ends - filled.counts) - (groups.ends - groups.counts)
    places = torch.arange(len(x), device=x.device) + torch.repeat_interleave(shift, groups.counts, output_size=len(x))
    spread = x.new_zeros(sum(filled.sizes), x.shape[1])
    spread[places] = x
    return spread
