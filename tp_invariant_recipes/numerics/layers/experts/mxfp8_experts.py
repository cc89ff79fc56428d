"""The experts' products in MXFP8: those of numerics/layers/experts/experts.py, on operands as in mxfp8_linear.py.

Along tokens the blocks of 32 begin anew with each batch, the tokens of one expert from one source, in every layout; the
last one of a batch may be shorter. The weights of all experts are rounded in one launch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import outside_modes
from tp_invariant_recipes.kernels.products import mxfp8
from tp_invariant_recipes.kernels.products.quantized import E4M3
from tp_invariant_recipes.numerics.layers.experts import experts
from tp_invariant_recipes.numerics.layers.experts.experts import Arithmetic
from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import Batches
from tp_invariant_recipes.numerics.layers.linear.mxfp8_linear import keeps_input


def grouped_linear(
    x: Tensor, batches: Batches, gradients: torch.dtype, arithmetic: Arithmetic, weights: Sequence[Tensor]
) -> Tensor:
    """x @ weight^T, each row with its expert's weight. x: [r, k] in order of batches; weights: [n, k] per expert."""
    return _GroupedLinear.apply(x, batches, gradients, arithmetic, keeps_input(*weights), *weights)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    @outside_modes
    def forward(
        ctx: Any, x: Tensor, batches: Batches, gradients: torch.dtype, arithmetic: Arithmetic, keeps: bool,
        *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        rows, columns = mxfp8.sides(x, E4M3, True, keeps, batches.groups)
        ctx.save_for_backward(*weights, *((columns,) if keeps else ()))
        ctx.batches, ctx.gradients, ctx.arithmetic = batches, gradients, arithmetic
        across = experts.of_batches(batches, mxfp8.of_weights(weights, rows=True))
        out = x.new_empty(len(x), weights[0].shape[0])
        return experts.rows_times(rows, across, out, batches.groups, arithmetic, transposed=True)

    @staticmethod
    @outside_modes
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        batches, arithmetic = ctx.batches, ctx.arithmetic
        wants_dx, wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        weights, kept = ctx.saved_tensors[: len(wanted)], ctx.saved_tensors[len(wanted) :]
        rows, columns = mxfp8.sides(gradients[0], ctx.gradients, wants_dx, any(wanted), batches.groups)
        dx = None
        if wants_dx:
            across = experts.of_batches(batches, mxfp8.of_weights(weights, rows=False))
            dx = rows.new_empty(len(rows), weights[0].shape[1])
            experts.rows_times(rows, across, dx, batches.groups, arithmetic, transposed=False)

        def add(outs: list[Tensor]) -> None:
            experts.add_products(columns, kept[0], outs, batches, arithmetic)

        dw = experts.weight_gradients(add, weights, batches, rows.device) if any(wanted) else [None] * len(weights)
        return (dx, None, None, None, None, *dw)
