"""Operands in MXFP8: those of plain.py, rounded along what is summed.

    forward          x @ weight^T      both along the input features
    input gradient   dy @ weight       both along the output features
    weight gradient  dy^T @ x          both along the tokens of a sequence

kernels/products/mxfp8.py says how. Activations and weights are e4m3, gradients what the recipe says. Numbers of MXFP8
are numbers of bf16, so products, trees and ranks' exchanges are those of bf16, and so is their speed. No block of 32
crosses a border of a shard (check/invariant/fp8.py): a rank rounds what it has. A rank with a part of the tokens keeps
its input as it is, since blocks along tokens may lie on two ranks. Along an expert's tokens blocks begin anew with each
batch, the tokens of one expert from one source, in every layout; the last one of a batch may be shorter.

A side that no product reads is not rounded. A weight is rounded where a product needs it, along its features in a
forward pass and along its rows in a backward pass, and not kept: rounding it again moves 8 bytes a number instead of
6, and two rounded copies would take twice the weight's memory. Of its input a layer keeps what the weight gradient
takes, in the memory of bf16, and nothing where the weight is frozen. The weights of all experts are rounded in one
launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from tp_invariant_recipes.kernels.products import mxfp8
from tp_invariant_recipes.kernels.products.grouped_product import Groups
from tp_invariant_recipes.kernels.products.quantize import E4M3, E5M2
from tp_invariant_recipes.numerics.layers.formats.plain import Plain, Products, require_single_sequence
from tp_invariant_recipes.numerics.precision import Fp8Layers
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import all_gather


@dataclass(frozen=True)
class Mxfp8(Plain):
    """products: of the rounded operands. gradients: their type. keeps: a backward pass will need the input."""

    gradients: torch.dtype = E5M2
    keeps: bool = True

    @classmethod
    def from_layers(cls, layers: Fp8Layers, products: Products) -> Self:
        """Read the arithmetic from a configuration's layers."""
        return cls(products, E5M2 if layers.gradients == "e5m2" else E4M3)

    def for_layer(self, x: Tensor, *weights: Tensor) -> Self:
        """As Plain's."""
        require_single_sequence(x)
        return self.for_experts(*weights)

    def for_experts(self, *weights: Tensor) -> Self:
        """As Plain's."""
        keeps = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
        return replace(self, keeps=keeps)

    def from_input(
        self, x: Tensor, gathers: bool = False, groups: Groups | None = None
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """As Plain's."""
        rows, columns = mxfp8.sides(x, E4M3, True, self.keeps and not gathers, groups)
        return rows, (columns,) if self.keeps else ()

    def from_gradient(
        self, dy: Tensor, mesh: VirtualMesh | None, wants_rows: bool, wants_columns: bool, groups: Groups | None = None
    ) -> tuple[Any, Any]:
        """As Plain's."""
        whole = dy if mesh is None else all_gather(dy, mesh)
        return mxfp8.sides(whole, self.gradients, wants_rows, wants_columns, groups)

    def columns(self, kept: Sequence[Tensor], tokens: Tensor | None) -> Any:
        """As Plain's."""
        return kept[0] if tokens is None else mxfp8.along_columns(tokens, E4M3)

    def across(self, weights: Sequence[Tensor], *, forward: bool) -> Sequence[Any]:
        """As Plain's."""
        if len(weights) == 1:
            return [(mxfp8.along_rows if forward else mxfp8.along_columns)(weights[0], E4M3)]
        return mxfp8.of_weights(weights, rows=forward)
