"""The published scheme: gather the operands of a sum across ranks, and compute the whole sum in one product.

Every product, also of weight gradients, is one launch of kernels/products/fixed_tile_product.py, in which each row's
and each column's result is independent of the others. So dividing rows or columns among ranks changes no bit. When
ranks have slices of the summed features, both operands are gathered first, in the order of the whole tensors:

    of the weight:      all ranks' slices, by all-gather
    of the activation:  this rank's tokens with all features, by all-to-all, if the result is divided by tokens
                        (sequence parallelism); otherwise all tokens with all features, by all-gather

A rank's rows of a column-parallel weight are segments (gate, up), drawn in numerics/layers/linear/linear.py. In the
whole tensor each segment is contiguous, so the slices are put into that order.

Gathered operands are freed after their product. Unlike plain.py, this scheme moves and holds whole weights, and without
sequence parallelism every rank computes the products over sharded features. Its products do not depend on virtual
shards.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.kernels.products.fixed_tile_product import fixed_tile_product
from tp_invariant_recipes.numerics.layers.formats.plain import Contraction, Plain, Products, sizes_of
from tp_invariant_recipes.numerics.products import cpu
from tp_invariant_recipes.numerics.products.operands import Split
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import Moving, start_all_gather, start_all_to_all


def _fixed_tiles(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False, **_shards: Split) -> Tensor:
    return fixed_tile_product(a, b, out, add=add)


class Gathered(Plain):
    """Plain operands, whole on every rank that multiplies them."""

    def start_contraction(
        self, rows: Any, across: Any, mesh: VirtualMesh, segments: Split, *, forward: bool, scatters: bool,
        dtype: torch.dtype,
    ) -> Contraction:  # fmt: skip
        """As Plain's; with `scatters` this rank gets all features of its tokens, otherwise of all."""
        return _Whole(
            start_all_to_all(rows, mesh) if scatters else start_all_gather(rows.unsqueeze(0), mesh),
            start_all_gather(across.unsqueeze(0), mesh),
            sizes_of(segments, rows.shape[1]),
            forward,
        )


GATHERED = Gathered(Products(_fixed_tiles, cpu.partials))


@dataclass
class _Whole:
    """The operands of a product over sharded features, in communication: a slice of the features from every rank.

    tokens: [t, m, k/t], m tokens; weight: [t, n, k/t] of a forward pass, else [t, k/t, n], the ranks' weights.
    sizes:  of the segments of k/t.
    """

    tokens: Moving
    weight: Moving
    sizes: tuple[int, ...]
    forward: bool

    def finished(self, dtype: torch.dtype) -> Tensor:
        """[m, n] in `dtype`."""
        a = _in_order(self.tokens.arrived(), self.sizes, 1)
        b = (
            _in_order(self.weight.arrived(), self.sizes, 1).t()
            if self.forward
            else _in_order(self.weight.arrived(), self.sizes, 0)
        )
        return fixed_tile_product(a, b, torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device))


def _in_order(slices: Tensor, sizes: tuple[int, ...], dim: int) -> Tensor:
    """Return the ranks' matrices, [t, …], joined along `dim` with every segment contiguous."""
    if len(slices) == 1:
        return slices[0]
    return torch.cat([part for segment in slices.split(sizes, dim + 1) for part in segment], dim)
