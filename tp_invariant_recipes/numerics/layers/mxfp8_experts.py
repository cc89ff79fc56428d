"""The experts' products in MXFP8: those of numerics/layers/experts.py, on operands as in mxfp8_linear.py.

Along tokens the blocks of 32 begin anew with each batch, the tokens of one expert from one source, in every layout; the
last one of a batch may be shorter.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.host.function_modes import outside_modes
from tp_invariant_recipes.kernels import mxfp8
from tp_invariant_recipes.kernels.quantized import E4M3
from tp_invariant_recipes.numerics.layers import experts, fp8_weights
from tp_invariant_recipes.numerics.layers.experts import Arithmetic
from tp_invariant_recipes.numerics.layers.fp8_weights import Fp8Weight
from tp_invariant_recipes.numerics.layers.token_dispatcher import Batches


def grouped_linear(
    x: Tensor, batches: Batches, gradients: torch.dtype, arithmetic: Arithmetic, weights: Sequence[Tensor]
) -> Tensor:
    """x @ weight^T, each row with its expert's weight. x: [r, k] in order of batches; weights: [n, k] per expert."""
    kept = [fp8_weights.rounded(weight) for weight in weights]
    return _GroupedLinear.apply(x, batches, gradients, arithmetic, kept, *weights)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    @outside_modes
    def forward(
        ctx: Any, x: Tensor, batches: Batches, gradients: torch.dtype, arithmetic: Arithmetic, kept: list[Fp8Weight],
        *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        rows, columns = mxfp8.both(x, E4M3, batches.groups)
        ctx.save_for_backward(columns, *weights)
        ctx.batches, ctx.gradients, ctx.arithmetic, ctx.kept = batches, gradients, arithmetic, kept
        across = experts.of_batches(batches, [weight.rows for weight in kept])
        out = x.new_empty(len(x), weights[0].shape[0])
        return experts.rows_times(rows, across, out, batches.groups, arithmetic, transposed=True)

    @staticmethod
    @outside_modes
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        batches, arithmetic = ctx.batches, ctx.arithmetic
        rows, columns = mxfp8.both(gradients[0], ctx.gradients, batches.groups)
        dx = None
        if ctx.needs_input_grad[0]:
            across = experts.of_batches(batches, [weight.of_backward() for weight in ctx.kept])
            dx = experts.rows_times(rows, across, torch.empty_like(x), batches.groups, arithmetic, transposed=False)

        def add(outs: list[Tensor]) -> None:
            experts.add_products(columns, x, outs, batches.groups, arithmetic)

        wanted = any(ctx.needs_input_grad[5:])
        dw = experts.weight_gradients(add, weights, batches, x.device) if wanted else [None] * len(weights)
        return (dx, None, None, None, None, *dw)
