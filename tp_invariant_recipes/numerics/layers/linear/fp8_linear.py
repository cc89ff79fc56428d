"""Column- and row-parallel products in FP8, with the sums and shards of numerics/layers/linear/linear.py.

    forward          x (e4m3) @ weight^T (e4m3)
    input gradient   dy (e5m2, or e4m3) @ weight
    weight gradient  dy^T @ x, over the tokens of a context shard

Each shard of a summed dimension is a product by the definition of kernels/products/fp8_sum.py, a multiple of 128 long,
so accumulators are promoted at the same places for every t. Scales are those of a tensor, whoever holds its parts:

    tensorwise  a maximum over the ranks that share the sequence, of a weight over those that share it
    blockwise   of 128 numbers along what is summed; no border of a shard cuts them

Every operand is quantized along its features and along its tokens. Tensorwise both are the same numbers, so what ranks
exchange is in FP8. A layer keeps its input in FP8 along its tokens, for the weight gradient; blockwise in bf16 where a
rank has a part of the tokens, since blocks of the whole may lie on two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import outside_modes
from tp_invariant_recipes.kernels.products.quantized import E4M3, E5M2, Quantized
from tp_invariant_recipes.numerics.layers.linear import fp8_weights, linear
from tp_invariant_recipes.numerics.layers.linear.fp8_weights import Fp8Weight
from tp_invariant_recipes.numerics.precision import Fp8Layers
from tp_invariant_recipes.numerics.products import fp8, quantize
from tp_invariant_recipes.numerics.products.operands import Parts
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import Moving, Reducing, all_gather, start_all_gather, start_reduce_scatter
from tp_invariant_recipes.numerics.sums.weight_gradient import weight_gradient


@dataclass(frozen=True)
class Scaling:
    """blockwise: or one scale a tensor. gradients: their FP8 type. group: of the ranks that share a sequence, whose
    shards of weights are each other's too; None: one rank has all."""

    blockwise: bool
    gradients: torch.dtype
    group: Any = None

    @classmethod
    def from_layers(cls, layers: Fp8Layers, group: Any) -> "Scaling":
        """Read the scaling from a configuration's layers. group: of this rank."""
        return cls(layers.recipe == "blockwise", E5M2 if layers.gradients == "e5m2" else E4M3, group)

    def rows(self, x: Tensor, dtype: torch.dtype) -> Quantized:
        """x [m, k] as an operand of a sum over k."""
        return quantize.along_rows(x, dtype) if self.blockwise else quantize.of_tensor(x, dtype, self.group)

    def both(self, x: Tensor, dtype: torch.dtype) -> quantize.Pair:
        """`rows`, and x^T [k, m] as an operand of a sum over tokens."""
        return quantize.along_both(x, dtype) if self.blockwise else quantize.of_tensor_both_ways(x, dtype, self.group)


def column_parallel(
    x: Tensor, weight: Tensor, mesh: VirtualMesh, segments: Parts, sequence_parallel: bool, scaling: Scaling
) -> Tensor:
    """x @ weight^T for a weight split along its output features; arguments as of linear.py's, x of one sequence.

    raises NotImplementedError: several sequences, which would share scales.
    """
    kept = fp8_weights.quantized(weight, scaling.blockwise, scaling.group)
    gathers = sequence_parallel and mesh.size > 1
    return _ColumnParallel.apply(one_sequence(x), weight, kept, mesh, segments, gathers, scaling)


def row_parallel(x: Tensor, weight: Tensor, mesh: VirtualMesh, sequence_parallel: bool, scaling: Scaling) -> Tensor:
    """x @ weight^T for a weight split along its input features; arguments as of linear.py's, x of one sequence.

    raises NotImplementedError: several sequences, which would share scales.
    """
    kept = fp8_weights.quantized(weight, scaling.blockwise, scaling.group)
    gathers = sequence_parallel and mesh.size > 1
    return _RowParallel.apply(one_sequence(x), weight, kept, mesh, gathers, scaling)


@dataclass(frozen=True)
class Fp8Linear:
    """The two functions of `numerics.mode.Linear`."""

    scaling: Scaling

    def column_parallel(
        self, x: Tensor, weight: Tensor, mesh: VirtualMesh, segments: Parts, sequence_parallel: bool
    ) -> Tensor:
        """`column_parallel` with this scaling."""
        return column_parallel(x, weight, mesh, segments, sequence_parallel, self.scaling)

    def row_parallel(self, x: Tensor, weight: Tensor, mesh: VirtualMesh, sequence_parallel: bool) -> Tensor:
        """`row_parallel` with this scaling."""
        return row_parallel(x, weight, mesh, sequence_parallel, self.scaling)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    @outside_modes
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, fp8_weight: Fp8Weight, mesh: VirtualMesh, segments: Parts, gathers: bool,
        scaling: Scaling,
    ) -> Tensor:  # fmt: skip
        tokens = _tokens(x)
        if gathers:
            q = scaling.rows(tokens, E4M3)
            ctx.save_for_backward(weight, *((tokens,) if scaling.blockwise else (q.data, q.scale)))
            q = _gathered(q, mesh)
        else:
            q, columns = scaling.both(tokens, E4M3)
            ctx.save_for_backward(weight, columns.data, columns.scale)
        ctx.fp8_weight, ctx.mesh, ctx.segments, ctx.gathers, ctx.scaling = fp8_weight, mesh, segments, gathers, scaling
        ctx.shape = x.shape
        y = tokens.new_empty(q.data.shape[0], weight.shape[0])
        return fp8.product(q, fp8_weight.rows, y).view(-1, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    @outside_modes
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        mesh, gathers, scaling = ctx.mesh, ctx.gathers, ctx.scaling
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        grad = _tokens(gradients[0])
        rows, columns = scaling.both(grad, scaling.gradients)
        gathering = _start_gathering(kept[0], mesh) if wants_dw and gathers else None
        reducing = dx = dw = None
        if wants_dx:
            reducing = _start_contraction(rows, ctx.fp8_weight.of_backward(), mesh, ctx.segments, grad.dtype)
        if wants_dw:  # while the nodes of dx are on their way
            x = _along_tokens(gathering.arrived(), kept, scaling) if gathering else _columns(kept, scaling)
            dw = _weight_gradient(weight, columns, x, mesh)
        if reducing is not None:
            dx = linear.finished(reducing, grad.dtype, mesh, gathers).view(ctx.shape)
        return dx, dw, None, None, None, None, None


class _RowParallel(torch.autograd.Function):
    @staticmethod
    @outside_modes
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, fp8_weight: Fp8Weight, mesh: VirtualMesh, scatters: bool, scaling: Scaling
    ) -> Tensor:
        q, columns = scaling.both(_tokens(x), E4M3)
        ctx.save_for_backward(weight, columns.data, columns.scale)
        ctx.fp8_weight, ctx.mesh, ctx.scatters, ctx.scaling, ctx.shape = fp8_weight, mesh, scatters, scaling, x.shape
        y = linear.finished(_start_contraction(q, fp8_weight.rows, mesh, 1, x.dtype), x.dtype, mesh, scatters)
        return y.view(-1, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    @outside_modes
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        mesh, scaling = ctx.mesh, ctx.scaling
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        grad = _tokens(gradients[0])
        if ctx.scatters and not scaling.blockwise:
            rows = _gathered(scaling.rows(grad, scaling.gradients), mesh)
            columns = quantize.transposed(rows)
        else:
            rows, columns = scaling.both(all_gather(grad, mesh) if ctx.scatters else grad, scaling.gradients)
        dx = dw = None
        if wants_dx:
            dx = torch.empty(rows.data.shape[0], weight.shape[1], dtype=grad.dtype, device=grad.device)
            dx = fp8.product(rows, ctx.fp8_weight.of_backward(), dx).view(ctx.shape)
        if wants_dw:
            dw = _weight_gradient(weight, columns, _columns(kept, scaling), mesh)
        return dx, dw, None, None, None, None


def one_sequence(x: Tensor) -> Tensor:
    """x of one sequence, [s, 1, k]. Raises NotImplementedError: there are several."""
    if x.shape[1] != 1:
        raise NotImplementedError(f"{x.shape[1]} sequences at once: their scales are a sequence's own; mbs=1")
    return x


def _columns(kept: Sequence[Tensor], scaling: Scaling) -> Quantized:
    """An input along its tokens, as a forward pass has kept it."""
    return Quantized(kept[0], kept[1], "1x128" if scaling.blockwise else "tensor")


def _along_tokens(tokens: Tensor, kept: Sequence[Tensor], scaling: Scaling) -> Quantized:
    """An input along its tokens, of which each rank has kept a part. tokens: of all ranks."""
    if scaling.blockwise:
        return quantize.along_columns(tokens, E4M3)
    return quantize.transposed(Quantized(tokens.view(E4M3), kept[1]))


def _gathered(q: Quantized, mesh: VirtualMesh) -> Quantized:
    """The ranks' rows, one after the other."""
    data = all_gather(q.data.view(torch.uint8), mesh).view(q.data.dtype)
    return Quantized(data, q.scale if q.blocks == "tensor" else all_gather(q.scale.contiguous(), mesh), q.blocks)


def _start_gathering(kept: Tensor, mesh: VirtualMesh) -> Moving:
    return start_all_gather(kept.view(torch.uint8) if kept.dtype == E4M3 else kept, mesh)


def _weight_gradient(weight: Tensor, dy: Quantized, x: Quantized, mesh: VirtualMesh) -> Tensor:
    """dy @ x^T, of each context shard by itself. dy: [n, tokens]; x: [k, tokens]."""
    size = dy.data.shape[1] // mesh.contexts
    starts = range(0, dy.data.shape[1], size)
    return weight_gradient(weight, *(partial(_added, dy.along_k(n, size), x.along_k(n, size)) for n in starts))


def _added(a: Quantized, b: Quantized, out: Tensor, add: bool) -> Tensor:
    return fp8.product(a, b, out, add=add)


def _start_contraction(
    a: Quantized, b: Quantized, mesh: VirtualMesh, segments: Parts, dtype: torch.dtype
) -> Reducing:  # fmt: skip
    """Start a @ b^T with the summed dimension divided among the ranks.

    a: [tokens, k/t]; b: [features, k/t]; dtype: that the result will have.
    """
    if isinstance(segments, int):
        segments = (a.data.shape[1] // segments,) * segments
    return start_reduce_scatter(fp8.nodes(a, b, mesh, segments, dtype), mesh)


def _tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()
