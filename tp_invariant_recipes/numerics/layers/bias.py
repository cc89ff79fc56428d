# SPDX-License-Identifier: Apache-2.0
"""Biases of invariant linear layers. The layer adds its bias itself, since a later addition would sum the gradient."""

from functools import partial
from typing import Any

from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.kernels.row_sums import token_sum
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import tree_sum
from tp_invariant_recipes.numerics.sums.weight_gradient import reduce_weight_gradient, weight_gradient


def column_bias(y: Tensor, bias: Tensor, contexts: int = 1) -> Tensor:
    """y + bias for a bias split as the features are; every rank has all tokens.

    y: [s, b, n/t]; bias: [n/t]; contexts: context shards that s consists of. returns: y's shape and dtype.
    """
    return _ColumnBias.apply(y, bias, contexts)


def row_bias(y: Tensor, bias: Tensor, mesh: VirtualMesh, sequence_parallel: bool) -> Tensor:
    """y + bias for a bias that every rank holds whole; its gradient is a tree sum over V chunks of each context shard.

    y: [s/t, b, n] with sequence parallelism, [s, b, n] without; bias: [n]. returns: y's shape and dtype.
    """
    return _RowBias.apply(y, bias, mesh, sequence_parallel)


class _ColumnBias(LayerFunction):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, contexts: int) -> Tensor:
        ctx.save_for_backward(bias)
        ctx.contexts = contexts
        return y + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (bias,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return gradients[0], None, None
        leaves = token_sum(gradients[0].reshape(-1, bias.shape[0]), ctx.contexts)
        return gradients[0], weight_gradient(bias, *(partial(_total, leaf) for leaf in leaves)), None


def _total(leaves: Tensor, out: Tensor, add: bool) -> None:
    total = tree_sum(leaves, out.dtype)
    out.add_(total) if add else out.copy_(total)


class _RowBias(LayerFunction):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, mesh: VirtualMesh, sequence_parallel: bool) -> Tensor:
        ctx.save_for_backward(bias)
        ctx.mesh, ctx.sequence_parallel = mesh, sequence_parallel
        return y + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (bias,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return gradients[0], None, None, None
        mesh, everywhere = ctx.mesh, not ctx.sequence_parallel
        leaves = token_sum(gradients[0].reshape(-1, bias.shape[0]), mesh.chunks if everywhere else mesh.local_chunks)
        return gradients[0], reduce_weight_gradient(bias, leaves, mesh, everywhere), None, None
