"""RMSNorm and the column-parallel product after it as one function of autograd, which costs the host less than two.

It launches what numerics/layers/norm.py and numerics/layers/linear/linear.py launch: the same kernels in the same
order.
"""

from typing import Any

from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.numerics.layers.linear.linear import Column
from tp_invariant_recipes.numerics.layers.norm import Norm, check_rows


def norm_column_parallel(
    x: Tensor, norm_weight: Tensor, weight: Tensor, eps: float, norm: Norm, layer: Column
) -> Tensor:
    """`column_parallel(rms_norm(x, norm_weight, …), weight, …)`.

    x: [s/t, b, k] with sequence parallelism, [s, b, k] without; norm_weight: [k]; weight: [n/t, k].
    norm, layer: the norm's and the product's division into shards. returns: [s, b, n/t] of x's dtype.
    """
    check_rows(x, norm_weight, norm.mesh, norm.shards_of)
    return _NormColumnParallel.apply(x, norm_weight, weight, eps, norm, layer)


class _NormColumnParallel(LayerFunction):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor, weight: Tensor, eps: float, norm: Norm, layer: Column
    ) -> Tensor:
        normal, scale = norm.forward(x, norm_weight, eps)
        y, kept = layer.forward(normal, weight)
        ctx.save_for_backward(x, norm_weight, scale, weight, *kept)
        ctx.norm, ctx.layer = norm, layer
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, scale, weight, *kept = ctx.saved_tensors
        wants_dx, wants_dg, wants_dw = ctx.needs_input_grad[:3]
        dnormal, dw = ctx.layer.backward(dy, weight, kept, wants_dx or wants_dg, wants_dw)
        if dnormal is None:
            return None, None, dw, None, None, None
        dx, dg = ctx.norm.backward(dnormal.view(x.shape), x, norm_weight, scale, wants_dx, wants_dg)
        return dx, dg, dw, None, None, None
