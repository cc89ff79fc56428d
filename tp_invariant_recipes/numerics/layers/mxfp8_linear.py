"""Column- and row-parallel products in MXFP8: those of numerics/layers/linear.py, on operands that are rounded before.

    forward          x @ weight^T      both along the input features
    input gradient   dy @ weight       both along the output features
    weight gradient  dy^T @ x          both along the tokens of a sequence

kernels/mxfp8.py says how. Activations and weights are e4m3, gradients what the recipe says. Numbers of MXFP8 are
numbers of bf16, so products, trees and ranks' exchanges are those of bf16, and so is their speed. No block of 32
crosses a border of a shard (coverage/fp8.py): a rank rounds what it has. A rank with a part of the tokens keeps its
input as it is, since blocks along tokens may lie on two ranks.

A layer keeps of its input what the weight gradient takes, so activations need the memory of bf16; weights lie beside
their two rounded copies (numerics/layers/fp8_weights.py).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.host.function_modes import outside_modes
from tp_invariant_recipes.kernels import mxfp8
from tp_invariant_recipes.kernels.quantized import E4M3, E5M2
from tp_invariant_recipes.numerics.layers import fp8_weights, linear
from tp_invariant_recipes.numerics.layers.fp8_linear import one_sequence
from tp_invariant_recipes.numerics.layers.fp8_weights import Fp8Weight
from tp_invariant_recipes.numerics.layers.linear import Column, Products
from tp_invariant_recipes.numerics.precision import Fp8Layers
from tp_invariant_recipes.numerics.products.operands import Parts
from tp_invariant_recipes.numerics.sums.context_shards import each_context
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import all_gather, start_all_gather


@dataclass(frozen=True)
class Mxfp8Linear:
    """The two functions of `numerics.mode.Linear`. products: of the rounded operands. gradients: their type.

    Both raise NotImplementedError: several sequences, whose tokens would share scales.
    """

    products: Products
    gradients: torch.dtype

    @classmethod
    def of(cls, layers: Fp8Layers, products: Products) -> "Mxfp8Linear":
        """What a configuration asks for."""
        return cls(products, E5M2 if layers.gradients == "e5m2" else E4M3)

    def column_parallel(
        self, x: Tensor, weight: Tensor, mesh: VirtualMesh, segments: Parts, sequence_parallel: bool
    ) -> Tensor:
        """As linear.py's, x of one sequence."""
        layer = Column(mesh, segments, sequence_parallel and mesh.size > 1, self.products)
        return _ColumnParallel.apply(one_sequence(x), weight, fp8_weights.rounded(weight), layer, self.gradients)

    def row_parallel(self, x: Tensor, weight: Tensor, mesh: VirtualMesh, sequence_parallel: bool) -> Tensor:
        """As linear.py's, x of one sequence."""
        layer = Column(mesh, 1, sequence_parallel and mesh.size > 1, self.products)
        return _RowParallel.apply(one_sequence(x), weight, fp8_weights.rounded(weight), layer, self.gradients)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    @outside_modes
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, kept: Fp8Weight, layer: Column, gradients: torch.dtype
    ) -> Tensor:  # fmt: skip
        tokens = linear.by_token(x)
        rows, saved = (mxfp8.along_rows(tokens, E4M3), tokens) if layer.sequence_parallel else mxfp8.both(tokens, E4M3)
        ctx.save_for_backward(weight, saved)
        ctx.kept, ctx.layer, ctx.gradients, ctx.shape = kept, layer, gradients, x.shape
        return layer.forward(rows.view(x.shape), kept.rows)

    @staticmethod
    @outside_modes
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, x = ctx.saved_tensors
        mesh, segments, gathers, products = ctx.layer
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        rows, columns = mxfp8.both(linear.by_token(gradients[0]), ctx.gradients)
        gathering = start_all_gather(x, mesh) if wants_dw and gathers else None
        reducing = dx = dw = None
        if wants_dx:
            reducing = linear.start_contraction(rows, ctx.kept.of_backward(), mesh, segments, products)
        if wants_dw:  # while the nodes of dx are on their way
            tokens = mxfp8.along_columns(gathering.arrived(), E4M3) if gathering else x
            shards = linear.shards_of(segments, mesh)
            dw = linear.gradient_of_weight(weight, columns, tokens, mesh, products.product, rows=shards)
        if reducing is not None:
            dx = linear.finished(reducing, x.dtype, mesh, gathers).view(ctx.shape)
        return dx, dw, None, None, None


class _RowParallel(torch.autograd.Function):
    @staticmethod
    @outside_modes
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, kept: Fp8Weight, layer: Column, gradients: torch.dtype
    ) -> Tensor:  # fmt: skip
        mesh, _, scatters, products = layer
        rows, columns = mxfp8.both(linear.by_token(x), E4M3)
        ctx.save_for_backward(weight, columns)
        ctx.kept, ctx.layer, ctx.gradients, ctx.shape = kept, layer, gradients, x.shape
        reducing = linear.start_contraction(rows, kept.rows.t(), mesh, 1, products)
        y = linear.finished(reducing, x.dtype, mesh, scatters)
        return y.view(-1, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    @outside_modes
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, x = ctx.saved_tensors
        mesh, _, scatters, products = ctx.layer
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        dy = all_gather(gradients[0], mesh) if scatters else gradients[0]
        rows, columns = mxfp8.both(linear.by_token(dy), ctx.gradients)
        dx = dw = None
        if wants_dx:
            dx = torch.empty_like(x)
            for some, out in each_context(mesh, rows, dx):
                products.product(some, ctx.kept.of_backward(), out, columns=mesh.local)
            dx = dx.view(ctx.shape)
        if wants_dw:
            dw = linear.gradient_of_weight(weight, columns, x, mesh, products.product, columns=mesh.local)
        return dx, dw, None, None, None
