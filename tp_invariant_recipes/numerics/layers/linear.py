# SPDX-License-Identifier: Apache-2.0
"""Column- and row-parallel GEMMs whose every sum over a sharded dimension is a tree over virtual shards.

A rank's rows of a column-parallel weight are segments (gate, up), each split into shards:

    [ segment 0: shard v0, v0+1, … | segment 1: shard v0, v0+1, … ]

so partial v of a sum over output features is the sum over segments, in order, of that segment's shard v. QKV is one
segment: Megatron interleaves its rows by query group, so a shard is whole groups. Segments are `segments` equal ones,
or have the sizes that it lists (Mamba's z, x, B, C and dt).

    forward          y  = x @ weight^T
    input gradient   dx = dy @ weight
    weight gradient  dw = dy^T @ x, a GEMM for each context shard

numerics/layers/formats/ says what the operands are and what multiplies them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.numerics.gemm.gemm import gemm
from tp_invariant_recipes.numerics.gemm.operands import Split
from tp_invariant_recipes.numerics.layers.formats import Format
from tp_invariant_recipes.numerics.layers.formats.plain import PLAIN
from tp_invariant_recipes.numerics.layers.norm import Norm, check_rows
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.symmetric_memory import PeerSum
from tp_invariant_recipes.numerics.sums.tree import Moving, all_gather, start_reduce_scatter
from tp_invariant_recipes.numerics.sums.weight_gradient import added_to_main_grad, main_grad_of


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
    """The two passes of a column-parallel GEMM, for functions of autograd. Fields: as of `column_parallel`.

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
            tokens = operands.columns(kept, None)
            dw = operands.weight_gradient(weight, columns, tokens, mesh, waits=scatters, columns=mesh.local)
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


def norm_column_parallel(
    x: Tensor, norm_weight: Tensor, weight: Tensor, eps: float, norm: Norm, layer: Column
) -> Tensor:
    """`column_parallel(rms_norm(x, norm_weight, …), weight, …)`.

    x: [s/t, b, k] with sequence parallelism, [s, b, k] without; norm_weight: [k]; weight: [n/t, k].
    norm, layer: the norm's and the GEMM's division into shards. returns: [s, b, n/t] of x's dtype.
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


def partial_linear(x: Tensor, weight: Tensor, mesh: VirtualMesh, gemm: Callable[..., Tensor] = gemm) -> Tensor:
    """x @ weight^T, chunk of tokens by chunk, for a weight that every rank holds whole.

    x:       [s/t, b, k], this rank's V/t chunks of the sequence; weight: [n, k]. gemm: as numerics/gemm/gemm.py's.
    returns: [s/t, b, n] of x's dtype.

    The weight gradient is a tree over V chunks. Each rank adds its slice of the sum to `main_grad`, of which Megatron
    adds up all ranks': elsewhere they have zeros. Without `main_grad` it is returned so.
    """
    return _ChunkedLinear.apply(x, weight, mesh, False, False, gemm)


def add_slice(weight: Tensor, mine: Tensor, rank: int) -> Tensor:
    """Return the gradient of a weight that every rank holds whole: slice `rank` of the flat sum, [n] fp32, and zeros.

    With `main_grad` it is added there, and the result is what a backward pass returns to autograd.
    """
    start = rank * len(mine)
    if main_grad_of(weight) is None:
        total = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
        total[start : start + len(mine)] += mine  # 0.0 + -0.0 is 0.0, on one rank as on several
        return total.to(weight.dtype).view(weight.shape)
    weight.main_grad.view(-1)[start : start + len(mine)].add_(mine)  # type: ignore[attr-defined]
    return added_to_main_grad(weight)


def gathered_linear(x: Tensor, weight: Tensor, mesh: VirtualMesh, sequence_parallel: bool) -> Tensor:
    """x @ weight^T, chunk of tokens by chunk, for a small weight whose rows are split over the ranks.

    x:       [s/t, b, k] with sequence parallelism, this rank's V/t chunks; [s, b, k] without, all V chunks.
    weight:  [n/t, k], this rank's rows of [n, k].
    returns: [s/t or s, b, n] of x's dtype.

    The weight gradient is a tree over V chunks, of which each rank gets its rows; `main_grad` gets them unrounded.
    """
    return _ChunkedLinear.apply(x, weight, mesh, not sequence_parallel, True, gemm)


class _ChunkedLinear(LayerFunction):
    """everywhere: x has all tokens. gathers: ranks hold rows of the weight, and get those of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, mesh: VirtualMesh, everywhere: bool, gathers: bool, gemm: Any
    ) -> Tensor:
        whole = all_gather(weight, mesh) if gathers else weight
        ctx.save_for_backward(x, weight, whole)
        ctx.mesh, ctx.everywhere, ctx.gathers, ctx.gemm = mesh, everywhere, gathers, gemm
        ctx.chunks = mesh.shards if everywhere else mesh.local_chunks
        rows = x.reshape(-1, x.shape[-1])
        out = rows.new_empty(len(rows), len(whole))
        return gemm(rows, whole.t(), out, rows=ctx.chunks).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x, weight, whole = ctx.saved_tensors
        mesh, gemm = ctx.mesh, ctx.gemm
        grad, rows = dy.reshape(-1, len(whole)), x.reshape(-1, x.shape[-1])
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        reducing = dx = dw = None
        if wants_dw:
            parts, part = (mesh.size, mesh.rank) if ctx.everywhere else (1, 0)
            reducing = _start_weight_gradient(grad.chunk(parts)[part], rows.chunk(parts)[part], mesh, gemm)
        if wants_dx:  # while the sums are on their way
            dx = gemm(grad, whole, torch.empty_like(rows), rows=ctx.chunks).view(x.shape)
        if reducing is not None:
            total = reducing.finished(torch.float32)
            dw = _kept_rows(weight, total) if ctx.gathers else add_slice(weight, total.view(-1), mesh.rank)
        return dx, dw, None, None, None, None


def _kept_rows(weight: Any, total: Tensor) -> Tensor:
    total = total.view(weight.shape)
    if main_grad_of(weight) is None:
        return total.to(weight.dtype)
    weight.main_grad.add_(total)
    return added_to_main_grad(weight)


def _start_weight_gradient(grad: Tensor, rows: Tensor, mesh: VirtualMesh, gemm: Any) -> Moving | PeerSum:
    """grad: [tokens/t, n]; rows: [tokens/t, k]. Its result is slice `rank` of the flat sum, [1, n · k / t] in fp32."""
    count = mesh.local_chunks
    node = _subtree(grad.chunk(count), rows.chunk(count), 0, count, gemm)
    return start_reduce_scatter(node.view(1, mesh.size, -1), mesh)


def _subtree(grads: tuple[Tensor, ...], rows: tuple[Tensor, ...], first: int, count: int, gemm: Any) -> Tensor:
    """Return the sum of `count` chunks' GEMMs in tree order, with one buffer a level of the tree."""
    if count > 2:
        subtree = _subtree(grads, rows, first, count // 2, gemm)
        return subtree.add_(_subtree(grads, rows, first + count // 2, count // 2, gemm))
    node = rows[0].new_empty(grads[0].shape[1], rows[0].shape[1], dtype=torch.float32)
    for chunk in range(count):  # adding to the output rounds as a separate addition would
        gemm(grads[first + chunk].t(), rows[first + chunk], node, add=chunk > 0)
    return node
