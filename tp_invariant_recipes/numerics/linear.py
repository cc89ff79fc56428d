"""Column- and row-parallel products whose every sum over a sharded dimension is a tree over virtual shards.

A rank's rows of a column-parallel weight are segments (gate, up), each split into shards:

    [ segment 0: shard v0, v0+1, … | segment 1: shard v0, v0+1, … ]

so partial v of a sum over output features is the sum over segments, in order, of that segment's shard v. QKV is one
segment: Megatron interleaves its rows by query group, so a shard is whole groups.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tp_invariant_recipes.numerics.mesh import VirtualMesh
from tp_invariant_recipes.numerics.product import product
from tp_invariant_recipes.numerics.tree import all_gather, tree_all_reduce, tree_reduce_scatter
from tp_invariant_recipes.numerics.weight_gradient import deliver_weight_gradient


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
        tokens = whole.reshape(-1, whole.shape[-1])
        y = tokens.new_empty(tokens.shape[0], weight.shape[0])
        for _, rows in _slices(weight.shape[0], segments * mesh.local):
            y[:, rows] = product(tokens, weight[rows].t(), x.dtype)
        return y.view(*whole.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        mesh = ctx.mesh
        grad = dy.reshape(-1, dy.shape[-1])
        partials = grad.new_zeros(mesh.local, grad.shape[0], weight.shape[1], dtype=torch.float32)
        for n, rows in _slices(weight.shape[0], ctx.segments * mesh.local):
            shard, segment = n % mesh.local, n // mesh.local
            partial = product(grad[:, rows], weight[rows], torch.float32)
            partials[shard] = partial if segment == 0 else partials[shard] + partial
        reduce = tree_reduce_scatter if ctx.sequence_parallel else tree_all_reduce
        dx = reduce(partials, mesh, x.dtype).view(x.shape)
        whole = all_gather(x, mesh) if ctx.sequence_parallel else x
        tokens = whole.reshape(-1, whole.shape[-1])
        dw = grad.new_empty(weight.shape, dtype=torch.float32)
        for _, rows in _slices(weight.shape[0], ctx.segments * mesh.local):
            dw[rows] = product(grad[:, rows].t(), tokens, torch.float32)
        return dx, deliver_weight_gradient(weight, dw), None, None, None


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, mesh, sequence_parallel):
        ctx.save_for_backward(x, weight)
        ctx.mesh, ctx.sequence_parallel = mesh, sequence_parallel
        tokens = x.reshape(-1, x.shape[-1])
        partials = tokens.new_empty(mesh.local, tokens.shape[0], weight.shape[0], dtype=torch.float32)
        for n, columns in _slices(weight.shape[1], mesh.local):
            partials[n] = product(tokens[:, columns], weight[:, columns].t(), torch.float32)
        reduce = tree_reduce_scatter if sequence_parallel else tree_all_reduce
        return reduce(partials, mesh, x.dtype).view(-1, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        mesh = ctx.mesh
        whole = all_gather(dy, mesh) if ctx.sequence_parallel else dy
        grad = whole.reshape(-1, whole.shape[-1])
        tokens = x.reshape(-1, x.shape[-1])
        dx = torch.empty_like(tokens)
        dw = grad.new_empty(weight.shape, dtype=torch.float32)
        for _, columns in _slices(weight.shape[1], mesh.local):
            dx[:, columns] = product(grad, weight[:, columns], x.dtype)
            dw[:, columns] = product(grad.t(), tokens[:, columns], torch.float32)
        return dx.view(x.shape), deliver_weight_gradient(weight, dw), None, None


def _slices(total: int, parts: int) -> Iterator[tuple[int, slice]]:
    """The `parts` equal slices of 0..total-1, numbered."""
    size = total // parts
    for n in range(parts):
        yield n, slice(n * size, (n + 1) * size)
