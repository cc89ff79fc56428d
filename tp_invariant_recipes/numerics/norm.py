"""RMSNorm whose rows do not know how many they are, and whose weight gradient is a tree sum of V partials.

Sums over a dimension are made of elementwise additions (`folding_sum`), because a library reduction may choose its
order by the number of rows. Divisions by the width are products with its reciprocal, on a GPU as on a CPU.
"""

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.numerics.mesh import VirtualMesh
from tp_invariant_recipes.numerics.tree import tree_all_reduce, tree_sum
from tp_invariant_recipes.numerics.weight_gradient import deliver_weight_gradient


class NormShards(Enum):
    """What the V shards of the rows are, and what this rank has of them.

    SEQUENCE_WHOLE: V chunks of the sequence; x is [s, b, h], all of them, on every rank.
    SEQUENCE_SLICE: the same chunks; x is [s/t, b, h], this rank's V/t.
    HEADS:          V groups of consecutive heads; x is [s, b, heads/t, d], this rank's V/t.
    """

    SEQUENCE_WHOLE = "sequence chunks, all on every rank"
    SEQUENCE_SLICE = "sequence chunks, divided among the ranks"
    HEADS = "groups of heads, divided among the ranks"


def rms_norm(x: Tensor, weight: Tensor, eps: float, mesh: VirtualMesh, shards_of: NormShards) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension, in fp32, rounded once.

    x:       as `shards_of` says; weight: its last dimension.
    returns: x's shape and dtype; a row's bits, here and in its gradient, depend on that row alone.

    The weight gradient is the sum over the rows of all ranks, the same bits for every t dividing V. With
    SEQUENCE_WHOLE every rank returns it. Else rank 0 does, and the others zeros: Megatron adds these gradients up over
    the TP group. Backward is then a collective: an all-gather of one fp32 row per rank.
    """
    if weight.requires_grad and torch.is_grad_enabled():
        _check(x, mesh, shards_of)
    return _RMSNorm.apply(x, weight, eps, mesh, shards_of)


def folding_sum(values: Tensor, dim: int) -> Tensor:
    """Add dimension `dim` of `values`, and overwrite them: the upper half is added to the lower until one is left.

    values:  […, n, …] fp32; of an odd n the middle one waits.
    returns: […, …], a view; the order of the additions depends on n alone, the launches are log2(n).
    """
    n = values.shape[dim]
    while n > 1:
        half = (n + 1) // 2
        values.narrow(dim, 0, n - half).add_(values.narrow(dim, half, n - half))
        n = half
    return values.select(dim, 0)


def _check(x: Tensor, mesh: VirtualMesh, shards_of: NormShards) -> None:
    dim, what = (-2, "heads") if shards_of is NormShards.HEADS else (0, "positions")
    whole = x.shape[dim] if shards_of is NormShards.SEQUENCE_WHOLE else x.shape[dim] * mesh.size
    if whole % mesh.shards:
        raise ValueError(f"{mesh.shards} virtual shards do not divide the norm's {whole} {what}")


def _weight_gradient(products: Tensor, mesh: VirtualMesh, shards_of: NormShards) -> Tensor:
    """Sum dy * normalized x over the rows of all ranks. Overwrites `products`.

    products: x's shape, fp32.
    returns:  [h] fp32, the same on every rank.
    """
    width = products.shape[-1]
    if shards_of is NormShards.SEQUENCE_WHOLE:
        return tree_sum(folding_sum(products.reshape(mesh.shards, -1, width), 1))
    if shards_of is NormShards.SEQUENCE_SLICE:
        partials = folding_sum(products.reshape(mesh.local, -1, width), 1)
    else:
        heads = products.shape[-2] // mesh.local
        tokens_added = folding_sum(products.reshape(-1, mesh.local, heads, width), 0)
        partials = folding_sum(tokens_added, 1)
    return tree_all_reduce(partials, mesh, torch.float32)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, mesh: VirtualMesh, shards_of: NormShards) -> Tensor:
        wide = x.float()
        mean = folding_sum(wide * wide, -1) * (1.0 / x.shape[-1])
        scale = (1.0 / torch.sqrt(mean + eps)).unsqueeze(-1)
        ctx.save_for_backward(x, weight, scale)
        ctx.mesh, ctx.shards_of = mesh, shards_of
        return (wide * scale * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, scale = ctx.saved_tensors
        dy = gradients[0].float()
        normal = x.float() * scale
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dnormal = dy * weight.float()
            along = folding_sum(dnormal * normal, -1).unsqueeze(-1) * (1.0 / x.shape[-1])
            dx = ((dnormal - normal * along) * scale).to(x.dtype)
        if ctx.needs_input_grad[1]:
            gradient = _weight_gradient(dy * normal, ctx.mesh, ctx.shards_of)
            if ctx.mesh.rank and ctx.shards_of is not NormShards.SEQUENCE_WHOLE:
                gradient = torch.zeros_like(gradient)
            # + 0.0: where Megatron adds the other ranks' zeros, -0.0 becomes 0.0; so it must at t = 1.
            dw = deliver_weight_gradient(weight, gradient) + 0.0
        return dx, dw, None, None, None
