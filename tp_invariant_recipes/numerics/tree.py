"""Tree sums: V partials, neighbours added level by level in fp32, one rounding at the root.

A rank's shards are a subtree: it adds them, sends one node, and the receiver finishes the same tree. Collectives only
move bytes; every addition is here.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.numerics.mesh import VirtualMesh


def tree_sum(partials: Tensor) -> Tensor:
    """Add the leading dimension in tree order.

    partials: [n, …] fp32, n a power of two.
    returns:  […] fp32, (p0 + p1) + (p2 + p3) … with neighbours added at every level.
    """
    while partials.shape[0] > 1:
        partials = partials[0::2] + partials[1::2]
    return partials[0]


def tree_all_reduce(partials: Tensor, mesh: VirtualMesh, dtype: torch.dtype) -> Tensor:
    """Sum the V partials of all ranks in tree order, on every rank.

    partials: [V/t, …] fp32, this rank's shards in order.
    returns:  […] of `dtype`, the same bits on every rank and for every t dividing V.
    """
    node = tree_sum(partials)
    if mesh.size > 1:
        nodes = node.new_empty(mesh.size * node.numel())
        dist.all_gather_into_tensor(nodes, node.reshape(-1), group=mesh.group)
        node = tree_sum(nodes.view(mesh.size, *node.shape))
    return node.to(dtype)


def tree_reduce_scatter(partials: Tensor, mesh: VirtualMesh, dtype: torch.dtype) -> Tensor:
    """Sum the V partials of all ranks in tree order, and keep this rank's slice of the next dimension.

    partials: [V/t, tokens, features] fp32, this rank's shards in order; t divides tokens.
    returns:  [tokens/t, features] of `dtype`: slice `rank` of what `tree_all_reduce` gives.
    """
    node = tree_sum(partials)
    if mesh.size > 1:
        slices = torch.empty_like(node)
        dist.all_to_all_single(slices, node.contiguous(), group=mesh.group)
        node = tree_sum(slices.view(mesh.size, -1, *node.shape[1:]))
    return node.to(dtype)


def all_gather(slices: Tensor, mesh: VirtualMesh) -> Tensor:
    """Put the ranks' slices of dimension 0 together, in rank order. Moves bytes only.

    slices: [tokens/t, …].
    returns: [tokens, …].
    """
    if mesh.size == 1:
        return slices
    whole = slices.new_empty(mesh.size * slices.shape[0], *slices.shape[1:])
    dist.all_gather_into_tensor(whole, slices.contiguous(), group=mesh.group)
    return whole
