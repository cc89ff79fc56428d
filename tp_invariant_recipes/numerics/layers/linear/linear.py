"""Column- and row-parallel products whose every sum over a sharded dimension is a tree over virtual shards.

A rank's rows of a column-parallel weight are segments (gate, up), each split into shards:

    [ segment 0: shard v0, v0+1, … | segment 1: shard v0, v0+1, … ]

so partial v of a sum over output features is the sum over segments, in order, of that segment's shard v. QKV is one
segment: Megatron interleaves its rows by query group, so a shard is whole groups. Segments are `segments` equal ones,
or have the sizes that it lists (Mamba's z, x, B, C and dt).

    forward          y  = x @ weight^T
    input gradient   dx = dy @ weight
    weight gradient  dw = dy^T @ x, a product for each context shard

numerics/layers/formats/ says what the operands are and what multiplies them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.numerics.layers.formats import Format
from tp_invariant_recipes.numerics.layers.formats.plain import PLAIN
from tp_invariant_recipes.numerics.products.operands import Split
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh


def column_parallel(
    x: Tensor, weight: Tensor, mesh: VirtualMesh, segments: Split, sequence_parallel: bool, operands: Format = PLAIN
) -> Tensor:
    """x @ weight^T for a weight split along its output features.

    x:        [s/t, b, k] with sequence parallelism, [s, b, k] without.
    weight:   [n/t, k], this rank's segments and shards.
    segments: their number, or the rows of each in `weight`.
    returns:  [s, b, n/t] of x's dtype.
    """
    layer = Column(mesh, segments, sequence_parallel and mesh.size > 1, operands.for_layer(x, weight))
    return _Parallel.apply(x, weight, layer)


def row_parallel(
    x: Tensor, weight: Tensor, mesh: VirtualMesh, sequence_parallel: bool, operands: Format = PLAIN
) -> Tensor:
    """x @ weight^T for a weight split along its input features.

    x:       [s, b, k/t].
    weight:  [n, k/t], this rank's shards.
    returns: [s/t, b, n] of x's dtype with sequence parallelism, [s, b, n] without.
    """
    return _Parallel.apply(x, weight, Row(mesh, sequence_parallel and mesh.size > 1, operands.for_layer(x, weight)))


def unsplit(x: Tensor, weight: Tensor, mesh: VirtualMesh, segments: Split) -> Tensor:
    """x @ weight^T on one rank, for both: the output of `row_parallel` and the gradients of `column_parallel`.

    x: [..., k]; weight: [n, k]; mesh: of one rank; segments: as of `column_parallel`. returns: [..., n] of x's dtype.
    """
    return _Parallel.apply(x, weight, Unsplit(mesh, segments))


class Column(NamedTuple):
    """The two passes of a column-parallel product, for functions of autograd. Fields: as of `column_parallel`.

    gathers: several ranks have slices of the tokens.
    """

    mesh: VirtualMesh
    segments: Split
    gathers: bool = False
    operands: Format = PLAIN

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x @ weight^T, as `column_parallel`, and what a backward pass needs of x."""
        mesh, segments, gathers, operands = self
        rows, kept = operands.from_input(by_token(x), gathers)
        if gathers:
            rows = operands.gathered(rows, mesh)
        # Not a view: the logits are this layer's output, and some losses change them in place.
        y = x.new_empty(x.shape[0] * (mesh.size if gathers else 1), *x.shape[1:-1], weight.shape[0])
        (across,) = operands.across((weight,), forward=True)
        operands.multiply(rows, across, by_token(y), mesh, shards_of(segments, mesh), forward=True)
        return y, kept

    def backward(
        self, dy: Tensor, weight: Tensor, kept: Sequence[Tensor], wants_dx: bool, wants_dw: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x, [tokens, k], and weight that are wanted. dy: of the output."""
        mesh, segments, gathers, operands = self
        rows, columns = operands.from_gradient(by_token(dy), None, wants_dx, wants_dw)
        gathering = operands.start_gathering(kept, mesh) if wants_dw and gathers else None
        summed = dx = dw = None
        if wants_dx:
            (across,) = operands.across((weight,), forward=False)
            summed = operands.start_contraction(
                rows, across, mesh, segments, forward=False, scatters=gathers, dtype=dy.dtype
            )
        if wants_dw:  # while the operands of dx, or its nodes, are on their way
            tokens = operands.columns(kept, gathering.arrived() if gathering else None)
            dw = operands.weight_gradient(weight, columns, tokens, mesh, rows=shards_of(segments, mesh))
        if summed is not None:
            dx = summed.finished(dy.dtype)
        return dx, dw


class Row(NamedTuple):
    """The two passes of a row-parallel product. scatters: the result is divided by tokens."""

    mesh: VirtualMesh
    scatters: bool
    operands: Format = PLAIN

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x @ weight^T, as `row_parallel`, and what a backward pass needs of x."""
        mesh, scatters, operands = self
        rows, kept = operands.from_input(by_token(x))
        (across,) = operands.across((weight,), forward=True)
        summed = operands.start_contraction(rows, across, mesh, 1, forward=True, scatters=scatters, dtype=x.dtype)
        return summed.finished(x.dtype).view(-1, *x.shape[1:-1], weight.shape[0]), kept

    def backward(
        self, dy: Tensor, weight: Tensor, kept: Sequence[Tensor], wants_dx: bool, wants_dw: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """As Column's."""
        mesh, scatters, operands = self
        rows, columns = operands.from_gradient(by_token(dy), mesh if scatters else None, wants_dx, wants_dw)
        dx = dw = None
        if wants_dx:
            (across,) = operands.across((weight,), forward=False)
            dx = dy.new_empty(dy.shape[:-1].numel() * (mesh.size if scatters else 1), weight.shape[1])
            operands.multiply(rows, across, dx, mesh, mesh.local, forward=False)
        if wants_dw:
            dw = operands.weight_gradient(weight, columns, operands.columns(kept, None), mesh, columns=mesh.local)
        return dx, dw


class Unsplit(Column):
    """A Row's output and a Column's gradients."""

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `unsplit`."""
        y, kept = Row(self.mesh, False).forward(by_token(x), weight)
        return y.view(*x.shape[:-1], weight.shape[0]), kept


class _Parallel(LayerFunction):
    """A layer's two passes. layer: Column, Row or Unsplit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Column | Row) -> Tensor:
        y, kept = layer.forward(x, weight)
        ctx.save_for_backward(weight, *kept)
        ctx.layer, ctx.shape = layer, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        dx, dw = ctx.layer.backward(dy, weight, kept, *ctx.needs_input_grad[:2])
        return None if dx is None else dx.view(ctx.shape), dw, None


def shards_of(segments: Split, mesh: VirtualMesh) -> Split:
    """Return the shards of all segments, as `product` takes them."""
    if isinstance(segments, int):
        return segments * mesh.local
    return tuple(segment // mesh.local for segment in segments for _ in range(mesh.local))


def by_token(x: Tensor) -> Tensor:
    """[…, features] → [tokens, features]."""
    return x.reshape(-1, x.shape[-1])
