"""The published scheme: gather the operands of a sum across ranks, and compute the whole sum in one product.

Every product, also of weight gradients, is one launch of kernels/products/fixed_tile_product.py, in which each row's
and each column's result is independent of the others. So dividing rows or columns among ranks changes no bit. When
ranks have slices of the summed features, both operands are gathered first, in the order of the whole tensors:

    of the weight:      all ranks' slices, by all-gather
    of the activation:  this rank's tokens with all features, by all-to-all, if the result is divided by tokens
                        (sequence parallelism); otherwise all tokens with all features, by all-gather

A rank's rows of a column-parallel weight are segments (gate, up), drawn in numerics/layers/linear/linear.py. In the
whole tensor each segment is contiguous, so the slices are put into that order.

Gathered operands are freed after their product. Unlike numerics/layers/linear/linear.py, this scheme moves and holds
whole weights, and without sequence parallelism every rank computes the products over sharded features. Its products do
not depend on virtual shards.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import outside_modes
from tp_invariant_recipes.kernels.products.fixed_tile_product import fixed_tile_product
from tp_invariant_recipes.numerics.products.operands import Parts
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import Moving, all_gather, start_all_gather, start_all_to_all
from tp_invariant_recipes.numerics.sums.weight_gradient import weight_gradient


def column_parallel(x: Tensor, weight: Tensor, mesh: VirtualMesh, segments: Parts, sequence_parallel: bool) -> Tensor:
    """x @ weight^T for a weight split along its output features.

    x:       [s/t, b, k] with sequence parallelism, [s, b, k] without.
    weight:  [n/t, k], this rank's slice of each segment.
    returns: [s, b, n/t] of x's dtype.

    ValueError: segments of unlike sizes; check/invariant/invariance.py refuses Mamba with numerics=gather before.
    """
    if not isinstance(segments, int):
        raise ValueError(f"numerics=gather has no segments of unlike sizes: {segments}")
    return _ColumnParallel.apply(x, weight, mesh, segments, sequence_parallel)


def row_parallel(x: Tensor, weight: Tensor, mesh: VirtualMesh, sequence_parallel: bool) -> Tensor:
    """x @ weight^T for a weight split along its input features.

    x:       [s, b, k/t].
    weight:  [n, k/t].
    returns: [s/t, b, n] of x's dtype with sequence parallelism, [s, b, n] without.
    """
    return _RowParallel.apply(x, weight, mesh, sequence_parallel)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    @outside_modes
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, mesh: VirtualMesh, segments: Parts, sequence_parallel: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mesh, ctx.segments, ctx.sequence_parallel = mesh, segments, sequence_parallel
        whole = all_gather(x, mesh) if sequence_parallel else x
        return _product(_tokens(whole), weight.t()).view(*whole.shape[:-1], weight.shape[0])

    @staticmethod
    @outside_modes
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        mesh, segments, sequence_parallel = ctx.mesh, ctx.segments, ctx.sequence_parallel
        grad = _tokens(dy)
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        gathering = start_all_gather(x, mesh) if wants_dw and sequence_parallel else Moving(x)
        summed = _start(grad, weight, mesh, sequence_parallel) if wants_dx else None
        dx = dw = None
        if wants_dw:  # during the communication of dx's operands
            tokens = _tokens(gathering.arrived())
            dw = weight_gradient(weight, lambda out, add: fixed_tile_product(grad.t(), tokens, out, add=add))
        if summed:
            dx = _product(summed.features(segments), summed.weight_rows(segments)).view(x.shape)
        return dx, dw, None, None, None


class _RowParallel(torch.autograd.Function):
    @staticmethod
    @outside_modes
    def forward(ctx: Any, x: Tensor, weight: Tensor, mesh: VirtualMesh, sequence_parallel: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mesh, ctx.sequence_parallel = mesh, sequence_parallel
        summed = _start(_tokens(x), weight, mesh, sequence_parallel)
        return _product(summed.features(), summed.weight_columns().t()).view(-1, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    @outside_modes
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = _tokens(all_gather(dy, ctx.mesh) if ctx.sequence_parallel else dy)
        tokens = _tokens(x)
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        dx = _product(grad, weight).view(x.shape) if wants_dx else None
        dw = None
        if wants_dw:
            dw = weight_gradient(weight, lambda out, add: fixed_tile_product(grad.t(), tokens, out, add=add))
        return dx, dw, None, None


@dataclass
class _Summed:
    """The operands of a product over sharded features, in communication: a slice of the features from every rank.

    tokens: [t, m, n/t], m tokens; weight: [t, …], the ranks' weights.
    """

    tokens: Moving
    weight: Moving

    def features(self, segments: int = 1) -> Tensor:
        """[m, n], in the order of the whole tensor."""
        return _in_order(self.tokens.arrived(), segments)

    def weight_rows(self, segments: int) -> Tensor:
        """[n, k] of weights [n/t, k], in the order of the whole tensor."""
        ranks = self.weight.arrived()
        slices = ranks.unflatten(1, (segments, -1))  # rank, segment, row
        return slices.transpose(0, 1).reshape(-1, ranks.shape[2])

    def weight_columns(self) -> Tensor:
        """[n, k] of weights [n, k/t]."""
        return _in_order(self.weight.arrived(), 1)


def _start(tokens: Tensor, weight: Tensor, mesh: VirtualMesh, sequence_parallel: bool) -> _Summed:
    """Start gathering a product's operands.

    tokens: [m, n/t]. With sequence parallelism this rank gets all features of its m/t tokens, otherwise of all m.
    """
    return _Summed(
        start_all_to_all(tokens, mesh) if sequence_parallel else start_all_gather(tokens.unsqueeze(0), mesh),
        start_all_gather(weight.unsqueeze(0), mesh),
    )


def _in_order(slices: Tensor, segments: int) -> Tensor:
    """[t, m, segments · f] → [m, segments · t · f], with every segment contiguous."""
    ranks, rows, _ = slices.shape
    return slices.view(ranks, rows, segments, -1).permute(1, 2, 0, 3).reshape(rows, -1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return fixed_tile_product(a, b, a.new_empty(a.shape[0], b.shape[1]))


def _tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
