"""Column- and row-parallel products whose every sum over a sharded dimension is a tree over virtual shards.

A rank's rows of a column-parallel weight are segments (gate, up), each split into shards:

    [ segment 0: shard v0, v0+1, … | segment 1: shard v0, v0+1, … ]

so partial v of a sum over output features is the sum over segments, in order, of that segment's shard v. QKV is one
segment: Megatron interleaves its rows by query group, so a shard is whole groups.

The two lowest levels of the tree cost nothing: a segment's product, and the right neighbour's, are added to what is
there by the product itself (`product(…, add=True)`), which rounds as a separate addition would.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tp_invariant_recipes.numerics.mesh import VirtualMesh
from tp_invariant_recipes.numerics.product import product
from tp_invariant_recipes.numerics.tree import Reducing, all_gather, start_all_gather, start_reduce_scatter
from tp_invariant_recipes.numerics.weight_gradient import weight_gradient


def column_parallel(x: Tensor, weight: Tensor, mesh: VirtualMesh, segments: int, sequence_parallel: bool) -> Tensor:
    """x @ weight^T for a weight split along its output features.

    x:       [s/t, b, k] with sequence parallelism, [s, b, k] without.
    weight:  [n/t, k], this rank's segments and shards.
    returns: [s, b, n/t] of x's dtype.
    """
    return _ColumnParallel.apply(x, weight, mesh, segments, sequence_parallel)


def row_parallel(x: Tensor, weight: Tensor, mesh: VirtualMesh, sequence_parallel: bool) -> Tensor:
    """x @ weight^T for a weight split along its input features.

    x:       [s, b, k/t].
    weight:  [n, k/t], this rank's shards.
    returns: [s/t, b, n] of x's dtype with sequence parallelism, [s, b, n] without.
    """
    return _RowParallel.apply(x, weight, mesh, sequence_parallel)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, mesh, segments, sequence_parallel):
        ctx.save_for_backward(x, weight)
        ctx.mesh, ctx.segments, ctx.sequence_parallel = mesh, segments, sequence_parallel
        whole = all_gather(x, mesh) if sequence_parallel else x
        tokens = _tokens(whole)
        y = tokens.new_empty(tokens.shape[0], weight.shape[0])
        product(tokens, weight.t(), y, columns=segments * mesh.local)
        return y.view(*whole.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        mesh, grad = ctx.mesh, _tokens(dy)
        shards = list(_slices(weight.shape[0], ctx.segments * mesh.local))
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        gathering = start_all_gather(x, mesh) if wants_dw and ctx.sequence_parallel else None
        reducing = dw = None
        if wants_dx:

            def partial(shard: int, node: Tensor, add: bool) -> None:
                for rows in shards[shard :: mesh.local]:
                    product(grad[:, rows], weight[rows], node, add=add)
                    add = True

            reducing = _reduce_scatter(partial, grad.shape[0], weight.shape[1], grad, mesh, ctx.segments)
        if wants_dw:  # while the partials of dx are on their way
            tokens = _tokens(gathering.arrived() if gathering else x)
            dw = weight_gradient(weight, lambda out, add: product(grad.t(), tokens, out, rows=len(shards), add=add))
        return _finished(reducing, x, mesh, ctx.sequence_parallel), dw, None, None, None


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, mesh, sequence_parallel):
        ctx.save_for_backward(x, weight)
        ctx.mesh, ctx.sequence_parallel = mesh, sequence_parallel
        tokens = _tokens(x)
        shards = list(_slices(weight.shape[1], mesh.local))

        def partial(shard: int, node: Tensor, add: bool) -> None:
            columns = shards[shard]
            product(tokens[:, columns], weight[:, columns].t(), node, add=add)

        reducing = _reduce_scatter(partial, tokens.shape[0], weight.shape[0], x, mesh, segments=1)
        y = reducing.finished(x.dtype)
        return (y if sequence_parallel else all_gather(y, mesh)).view(-1, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        mesh = ctx.mesh
        grad = _tokens(all_gather(dy, mesh) if ctx.sequence_parallel else dy)
        tokens = _tokens(x)
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        dx = dw = None
        if wants_dx:
            dx = torch.empty_like(tokens, memory_format=torch.contiguous_format)
            dx = product(grad, weight, dx, columns=mesh.local).view(x.shape)
        if wants_dw:
            dw = weight_gradient(weight, lambda out, add: product(grad.t(), tokens, out, columns=mesh.local, add=add))
        return dx, dw, None, None


def _reduce_scatter(
    partial: Callable[[int, Tensor, bool], None],
    tokens: int,
    features: int,
    like: Tensor,
    mesh: VirtualMesh,
    segments: int,
) -> Reducing:
    """Begin the sum of all shards' partials.

    partial: writes partial `shard` of this rank to a node, or adds it to what is there. A partial of several segments
             is a sum itself and needs a place of its own; of one segment, the right neighbour is added in place.
    """
    step = 1 if segments > 1 else 2
    nodes = like.new_empty(max(1, mesh.local // step), tokens, features, dtype=torch.float32)
    for shard in range(mesh.local):
        partial(shard, nodes[shard // step], shard % step > 0)
    return start_reduce_scatter(nodes, mesh)


def _finished(reducing: Reducing | None, x: Tensor, mesh: VirtualMesh, sequence_parallel: bool) -> Tensor | None:
    if reducing is None:
        return None
    dx = reducing.finished(x.dtype)
    return (dx if sequence_parallel else all_gather(dx, mesh)).view(x.shape)


def _tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _slices(total: int, parts: int) -> Iterator[slice]:
    """The `parts` equal slices of 0..total-1, in order."""
    size = total // parts
    return (slice(n * size, (n + 1) * size) for n in range(parts))
