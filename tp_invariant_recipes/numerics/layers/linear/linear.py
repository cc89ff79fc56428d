"""Column- and row-parallel products whose every sum over a sharded dimension is a tree over virtual shards.

A rank's rows of a column-parallel weight are segments (gate, up), each split into shards:

    [ segment 0: shard v0, v0+1, … | segment 1: shard v0, v0+1, … ]

so partial v of a sum over output features is the sum over segments, in order, of that segment's shard v. QKV is one
segment: Megatron interleaves its rows by query group, so a shard is whole groups. Segments are `segments` equal ones,
or have the sizes that it lists (Mamba's z, x, B, C and dt).

On a GPU the lowest levels of the tree cost little (numerics/products/contraction.py): one launch adds up to four
products, or a product itself adds the product of a segment or of the right neighbour to the output, and rounds as a
separate addition would.

Where a rank holds the tokens of several context shards (numerics/sums/context_shards.py), each is a product of its own:
sums over tokens are trees over these shards, and on a CPU a product's bits depend on the number of its rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction, outside_modes
from tp_invariant_recipes.numerics.products import contraction, cpu
from tp_invariant_recipes.numerics.products.operands import Parts
from tp_invariant_recipes.numerics.products.product import product
from tp_invariant_recipes.numerics.sums.context_shards import each_context
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import (
    Reducing,
    all_gather,
    start_all_gather,
    start_reduce_scatter,
)
from tp_invariant_recipes.numerics.sums.weight_gradient import weight_gradient


@dataclass(frozen=True)
class Products:
    """Multiply matrices.

    product: as `numerics.products.product.product`. partials, on CPUs alone: as `numerics.products.cpu.partials`.
    """

    product: Callable[..., Tensor]
    partials: Callable[..., Tensor]


LIBRARY = Products(product, cpu.partials)


def column_parallel(
    x: Tensor, weight: Tensor, mesh: VirtualMesh, segments: Parts, sequence_parallel: bool, products: Products = LIBRARY
) -> Tensor:
    """x @ weight^T for a weight split along its output features.

    x:        [s/t, b, k] with sequence parallelism, [s, b, k] without.
    weight:   [n/t, k], this rank's segments and shards.
    segments: their number, or the rows of each in `weight`.
    returns:  [s, b, n/t] of x's dtype.
    """
    return _ColumnParallel.apply(x, weight, mesh, segments, sequence_parallel, products)


def row_parallel(
    x: Tensor, weight: Tensor, mesh: VirtualMesh, sequence_parallel: bool, products: Products = LIBRARY
) -> Tensor:
    """x @ weight^T for a weight split along its input features.

    x:       [s, b, k/t].
    weight:  [n, k/t], this rank's shards.
    returns: [s/t, b, n] of x's dtype with sequence parallelism, [s, b, n] without.
    """
    return _RowParallel.apply(x, weight, mesh, sequence_parallel, products)


def unsplit(x: Tensor, weight: Tensor, mesh: VirtualMesh, segments: Parts) -> Tensor:
    """x @ weight^T on one rank, for both: the output of `row_parallel` and the gradients of `column_parallel`.

    x: [..., k]; weight: [n, k]; mesh: of one rank; segments: as of `column_parallel`. returns: [..., n] of x's dtype.
    """
    return _Unsplit.apply(x, weight, mesh, segments)


class Column(NamedTuple):
    """The two passes of a column-parallel product, for functions of autograd. Fields: as of `column_parallel`."""

    mesh: VirtualMesh
    segments: Parts
    sequence_parallel: bool
    products: Products = LIBRARY

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight^T, as `column_parallel`."""
        mesh = self.mesh
        whole = all_gather(x, mesh) if self.sequence_parallel else x
        tokens = by_token(whole)
        # Not a view: the logits are this layer's output, and some losses change them in place.
        y = tokens.new_empty(*whole.shape[:-1], weight.shape[0])
        for rows, out in each_context(mesh, tokens, by_token(y)):
            self.products.product(rows, weight.t(), out, columns=shards_of(self.segments, mesh))
        return y

    def backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, wants_dx: bool, wants_dw: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of x and weight that are wanted. dy: of the output."""
        mesh, segments, sequence_parallel, products = self
        grad = by_token(dy)
        gathering = start_all_gather(x, mesh) if wants_dw and sequence_parallel else None
        reducing = start_contraction(grad, weight, mesh, segments, products) if wants_dx else None
        dx = dw = None
        if wants_dw:  # while the nodes of dx are on their way
            tokens = by_token(gathering.arrived() if gathering else x)
            dw = gradient_of_weight(weight, grad, tokens, mesh, products.product, rows=shards_of(segments, mesh))
        if reducing is not None:
            dx = finished(reducing, x.dtype, mesh, sequence_parallel).view_as(x)
        return dx, dw


class _ColumnParallel(LayerFunction):
    @staticmethod
    @outside_modes
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        mesh: VirtualMesh,
        segments: Parts,
        sequence_parallel: bool,
        products: Products,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer = Column(mesh, segments, sequence_parallel, products)
        return layer.forward(x, weight)

    @staticmethod
    @outside_modes
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.layer.backward(dy, *ctx.saved_tensors, *ctx.needs_input_grad[:2]), None, None, None, None


class _Unsplit(LayerFunction):
    @staticmethod
    @outside_modes
    def forward(ctx: Any, x: Tensor, weight: Tensor, mesh: VirtualMesh, segments: Parts) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = Column(mesh, segments, False)
        summed = start_contraction(by_token(x), weight.t(), mesh, 1, LIBRARY)
        return finished(summed, x.dtype, mesh, False).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @outside_modes
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.layer.backward(dy, *ctx.saved_tensors, *ctx.needs_input_grad[:2]), None, None


class _RowParallel(LayerFunction):
    @staticmethod
    @outside_modes
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, mesh: VirtualMesh, sequence_parallel: bool, products: Products
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mesh, ctx.sequence_parallel, ctx.products = mesh, sequence_parallel, products
        reducing = start_contraction(by_token(x), weight.t(), mesh, 1, products)
        y = finished(reducing, x.dtype, mesh, sequence_parallel)
        return y.view(-1, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    @outside_modes
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        mesh, product = ctx.mesh, ctx.products.product
        grad = by_token(all_gather(dy, mesh) if ctx.sequence_parallel else dy)
        tokens = by_token(x)
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        dx = dw = None
        if wants_dx:
            dx = torch.empty_like(tokens, memory_format=torch.contiguous_format)
            for rows, out in each_context(mesh, grad, dx):
                product(rows, weight, out, columns=mesh.local)
            dx = dx.view_as(x)
        if wants_dw:
            dw = gradient_of_weight(weight, grad, tokens, mesh, product, columns=mesh.local)
        return dx, dw, None, None, None


def gradient_of_weight(
    weight: Tensor, grad: Tensor, tokens: Tensor, mesh: VirtualMesh, product: Callable[..., Tensor], **shards: Parts
) -> Tensor:
    """grad^T @ tokens, of each context shard by itself. shards: the rows or columns of `product`."""
    parts = each_context(mesh, grad, tokens)
    return weight_gradient(weight, *(partial(_added, product, dy.t(), x, shards) for dy, x in parts))


def _added(
    product: Callable[..., Tensor], a: Tensor, b: Tensor, shards: dict[str, Parts], out: Tensor, add: bool
) -> Tensor:
    return product(a, b, out, add=add, **shards)


def start_contraction(a: Tensor, b: Tensor, mesh: VirtualMesh, segments: Parts, products: Products) -> Reducing:
    """Start a @ b with the summed dimension divided among the ranks.

    a: [tokens, k/t]; b: [k/t, features]: this rank's segments and shards of k.
    """
    if isinstance(segments, int):
        segments = (a.shape[1] // segments,) * segments
    if not a.is_cuda:
        partials = [products.partials(rows, b, mesh.local, segments) for (rows,) in each_context(mesh, a)]
        return start_reduce_scatter(torch.cat(partials, 1) if len(partials) > 1 else partials[0], mesh)
    return start_reduce_scatter(contraction.nodes(a, b, mesh, segments, products.product), mesh)


def shards_of(segments: Parts, mesh: VirtualMesh) -> Parts:
    """The shards of all segments, as `product` takes them."""
    if isinstance(segments, int):
        return segments * mesh.local
    return tuple(segment // mesh.local for segment in segments for _ in range(mesh.local))


def finished(reducing: Reducing, dtype: torch.dtype, mesh: VirtualMesh, sequence_parallel: bool) -> Tensor:
    """A sum over ranks: [tokens/t, features] with sequence parallelism, [tokens, features] without."""
    mine = reducing.finished(dtype)
    return mine if sequence_parallel else all_gather(mine, mesh)


def by_token(x: Tensor) -> Tensor:
    """[…, features] → [tokens, features]."""
    return x.reshape(-1, x.shape[-1])
