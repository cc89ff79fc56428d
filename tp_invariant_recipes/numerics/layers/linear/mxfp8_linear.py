"""Column- and row-parallel products in MXFP8: those of numerics/layers/linear/linear.py, on rounded operands.

    forward          x @ weight^T      both along the input features
    input gradient   dy @ weight       both along the output features
    weight gradient  dy^T @ x          both along the tokens of a sequence

kernels/products/mxfp8.py says how. Activations and weights are e4m3, gradients what the recipe says. Numbers of MXFP8
are numbers of bf16, so products, trees and ranks' exchanges are those of bf16, and so is their speed. No block of 32
crosses a border of a shard (check/invariant/fp8.py): a rank rounds what it has. A rank with a part of the tokens keeps
its input as it is, since blocks along tokens may lie on two ranks.

A side that no product reads is not rounded. A weight is rounded where a product needs it, along its features in a
forward pass and along its rows in a backward pass, and not kept: rounding it again moves 8 bytes a number instead of
6, and two rounded copies would take twice the weight's memory. Of its input a layer keeps what the weight gradient
takes, in the memory of bf16, and nothing where the weight is frozen.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import outside_modes
from tp_invariant_recipes.kernels.products import mxfp8
from tp_invariant_recipes.kernels.products.quantized import E4M3, E5M2
from tp_invariant_recipes.numerics.layers.linear import linear
from tp_invariant_recipes.numerics.layers.linear.fp8_linear import one_sequence
from tp_invariant_recipes.numerics.layers.linear.linear import Column, Products
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
    def from_layers(cls, layers: Fp8Layers, products: Products) -> "Mxfp8Linear":
        """Read the arithmetic from a configuration's layers."""
        return cls(products, E5M2 if layers.gradients == "e5m2" else E4M3)

    def column_parallel(
        self, x: Tensor, weight: Tensor, mesh: VirtualMesh, segments: Parts, sequence_parallel: bool
    ) -> Tensor:
        """As linear.py's, x of one sequence."""
        layer = Column(mesh, segments, sequence_parallel and mesh.size > 1, self.products)
        return _ColumnParallel.apply(one_sequence(x), weight, layer, self.gradients, keeps_input(weight))

    def row_parallel(self, x: Tensor, weight: Tensor, mesh: VirtualMesh, sequence_parallel: bool) -> Tensor:
        """As linear.py's, x of one sequence."""
        layer = Column(mesh, 1, sequence_parallel and mesh.size > 1, self.products)
        return _RowParallel.apply(one_sequence(x), weight, layer, self.gradients, keeps_input(weight))


def keeps_input(*weights: Tensor) -> bool:
    """Whether a backward pass will need the input; to be asked before autograd's function, which hides it."""
    return torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    @outside_modes
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, layer: Column, gradients: torch.dtype, keeps: bool
    ) -> Tensor:  # fmt: skip
        tokens = linear.by_token(x)
        rows, columns = mxfp8.sides(tokens, E4M3, True, keeps and not layer.sequence_parallel)
        ctx.save_for_backward(weight, *((columns,) if keeps else ()))
        ctx.layer, ctx.gradients, ctx.shape = layer, gradients, x.shape
        return layer.forward(rows.view(x.shape), mxfp8.along_rows(weight, E4M3))

    @staticmethod
    @outside_modes
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        mesh, segments, gathers, products = ctx.layer
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        rows, columns = mxfp8.sides(linear.by_token(gradients[0]), ctx.gradients, wants_dx, wants_dw)
        gathering = start_all_gather(kept[0], mesh) if wants_dw and gathers else None
        reducing = dx = dw = None
        if wants_dx:
            across = mxfp8.along_columns(weight, E4M3)
            reducing = linear.start_contraction(rows, across, mesh, segments, products)
        if wants_dw:  # while the nodes of dx are on their way
            tokens = mxfp8.along_columns(gathering.arrived(), E4M3) if gathering else kept[0]
            shards = linear.shards_of(segments, mesh)
            dw = linear.gradient_of_weight(weight, columns, tokens, mesh, products.product, rows=shards)
        if reducing is not None:
            dx = linear.finished(reducing, rows.dtype, mesh, gathers).view(ctx.shape)
        return dx, dw, None, None, None


class _RowParallel(torch.autograd.Function):
    @staticmethod
    @outside_modes
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, layer: Column, gradients: torch.dtype, keeps: bool
    ) -> Tensor:  # fmt: skip
        mesh, _, scatters, products = layer
        rows, columns = mxfp8.sides(linear.by_token(x), E4M3, True, keeps)
        ctx.save_for_backward(weight, *((columns,) if keeps else ()))
        ctx.layer, ctx.gradients, ctx.shape = layer, gradients, x.shape
        reducing = linear.start_contraction(rows, mxfp8.along_rows(weight, E4M3).t(), mesh, 1, products)
        y = linear.finished(reducing, x.dtype, mesh, scatters)
        return y.view(-1, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    @outside_modes
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        mesh, _, scatters, products = ctx.layer
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        dy = all_gather(gradients[0], mesh) if scatters else gradients[0]
        rows, columns = mxfp8.sides(linear.by_token(dy), ctx.gradients, wants_dx, wants_dw)
        dx = dw = None
        if wants_dx:
            across = mxfp8.along_columns(weight, E4M3)
            dx = rows.new_empty(len(rows), weight.shape[1])
            for part, out in each_context(mesh, rows, dx):
                products.product(part, across, out, columns=mesh.local)
            dx = dx.view(ctx.shape)
        if wants_dw:
            dw = linear.gradient_of_weight(weight, columns, kept[0], mesh, products.product, columns=mesh.local)
        return dx, dw, None, None, None
