"""A gate of each token: y = out · sigmoid(x · w), as shared experts have one (`model.moe_shared_expert_gate`).

Rows are computed by themselves: sums over features fold halves, whose order only their number decides. The weight
gradient is a sum over tokens, a tree over chunks, as of a router.
"""

from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.kernels.folding_sum import folding_sum
from tp_invariant_recipes.kernels.token_sum import token_sum
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.weight_gradient import reduce_weight_gradient


def token_gate(out: Tensor, x: Tensor, weight: Tensor, mesh: VirtualMesh) -> Tensor:
    """out · sigmoid(x · w) in fp32, rounded once.

    out, x: [s/t, b, h], this rank's part of the sequence. weight: [1, h], whole on every rank.
    returns: out's shape and dtype.
    """
    return _TokenGate.apply(out, x, weight, mesh)


class _TokenGate(LayerFunction):
    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, weight: Tensor, mesh: VirtualMesh) -> Tensor:
        sums = folding_sum(x.float() * weight.float(), -1)
        # A CPU's exp is another one for the last numbers of a tensor, which fill no vector: chunks have one shape.
        score = torch.cat([part.sigmoid() for part in sums.chunk(mesh.local_chunks)]).unsqueeze(-1)
        ctx.save_for_backward(out, x, weight, score)
        ctx.mesh = mesh
        return (out.float() * score).to(out.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        out, x, weight, score = ctx.saved_tensors
        dy = gradients[0].float()
        slope = folding_sum(dy * out.float(), -1).unsqueeze(-1) * score * (1.0 - score)
        leaves = token_sum((slope * x.float()).flatten(0, -2), ctx.mesh.local_chunks)
        dw = reduce_weight_gradient(weight, leaves, ctx.mesh, everywhere=False)
        return (dy * score).to(out.dtype), (slope * weight.float()).to(x.dtype), dw, None
