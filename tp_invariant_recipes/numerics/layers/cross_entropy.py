# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of logits whose vocabulary is divided among the ranks; its one inexact sum is a tree sum of V partials.

It keeps only the logits and their gradient; the backward pass computes the exponentials again.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.kernels import cross_entropy as kernel
from tp_invariant_recipes.kernels.row_sums import folding_sum
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import tree_all_reduce


class LossKernels(NamedTuple):
    """The two functions of kernels/cross_entropy.py, and the logarithm of a tensor."""

    sum_of_exponentials: Callable[..., Tensor]
    softmax_gradient: Callable[..., Tensor]
    logarithm: Callable[[Tensor], Tensor]


LIBRARY = LossKernels(kernel.sum_of_exponentials, kernel.softmax_gradient, torch.log)


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, mesh: VirtualMesh, kernels: LossKernels = LIBRARY
) -> Tensor:
    """`log(sum(exp(logits))) - logits[target]`, in fp32.

    logits:  [s, b, vocab/t], this rank's slice of the vocabulary; target: [s, b] int64, of the whole vocabulary.
    returns: [s, b] fp32, the same bits on every rank and for every t dividing V; so is the gradient, in logits' dtype.

    A target outside the vocabulary selects no logit, as in Megatron: mask its loss. A row with a NaN or +inf has only
    NaN as loss and gradient.
    """
    vocabulary = logits.shape[-1] * mesh.size
    if vocabulary % mesh.shards:
        raise ValueError(f"{mesh.shards} virtual shards do not divide a vocabulary of {vocabulary}")
    return _CrossEntropy.apply(logits, target, mesh, kernels)


def log_probabilities(logits: Tensor, mesh: VirtualMesh, kernels: LossKernels = LIBRARY) -> Tensor:
    """`0.0 - vocab_parallel_cross_entropy` of every column as the target, bit for bit; shapes as of `entropy`.

    returns: [rows, vocab/t] fp32.
    """
    highest = _highest(logits, mesh)
    total = tree_all_reduce(kernels.sum_of_exponentials(logits, highest, mesh.local), mesh, torch.float32)
    return kernel.log_probabilities(logits.contiguous(), highest, kernels.logarithm(total).view(-1))


def entropy(logits: Tensor, mesh: VirtualMesh, kernels: LossKernels = LIBRARY) -> Tensor:
    """`-sum(p log p)` of p = softmax(logits), without a gradient; of logits that are all finite.

    logits:  [rows, vocab/t], this rank's slice of the vocabulary.
    returns: [rows] fp32, the same bits on every rank and for every t dividing V: elementwise fp32, a folding sum over
             each shard, and the tree over V shards. It holds three tensors of logits' shape in fp32.
    """
    rows, highest = logits.to(torch.float32, copy=True), _highest(logits, mesh)
    total = tree_all_reduce(kernels.sum_of_exponentials(rows, highest, mesh.local), mesh, torch.float32)
    nowhere, ones = torch.full_like(highest, -1, dtype=torch.int64), torch.ones_like(highest)
    softmax = kernels.softmax_gradient(rows, nowhere, highest, total, ones, mesh.local)
    logarithm = rows.sub_(highest.unsqueeze(-1)).sub_(kernels.logarithm(total).unsqueeze(-1))
    terms = softmax.mul_(logarithm).view(len(rows), mesh.local, -1)
    return -tree_all_reduce(folding_sum(terms, -1).t().contiguous(), mesh, torch.float32)


def rank_of(logits: Tensor, target: Tensor, mesh: VirtualMesh) -> Tensor:
    """[rows] int64: the target's place among the logits by size, from 1 on. Shapes as of `entropy`; target: [rows]."""
    nothing = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    above = kernel.count_greater(logits.contiguous(), _picked(logits, target, nothing, mesh))
    if mesh.size > 1:
        dist.all_reduce(above, group=mesh.group)
    return above + 1


def _highest(logits: Tensor, mesh: VirtualMesh) -> Tensor:
    """[s, b] fp32, the maximum over the vocabulary; +inf instead of NaN, which a MAX of ranks may lose."""
    highest = logits.amax(-1).float()
    highest = highest.masked_fill(highest.isnan(), math.inf).contiguous() + 0.0  # of 0.0 and -0.0 either is a maximum
    if mesh.size > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=mesh.group)
    return highest


def _picked(logits: Tensor, target: Tensor, highest: Tensor, mesh: VirtualMesh) -> Tensor:
    """[s, b] fp32, logits[target] - highest: one rank has the value, the others add zeros."""
    size = logits.shape[-1]
    index = target - mesh.rank * size
    value = logits.gather(-1, index.clamp(0, size - 1).unsqueeze(-1)).squeeze(-1) - highest
    picked = value.masked_fill((index < 0) | (index >= size), 0.0).contiguous() + 0.0  # a zero added, at t = 1 too
    if mesh.size > 1:
        dist.all_reduce(picked, group=mesh.group)
    return picked


class _CrossEntropy(LayerFunction):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, mesh: VirtualMesh, kernels: LossKernels) -> Tensor:
        highest = _highest(logits, mesh)
        picked = _picked(logits, target, highest, mesh)
        partials = kernels.sum_of_exponentials(_rows(logits), highest.flatten(), mesh.local)
        total = tree_all_reduce(partials, mesh, torch.float32).view(highest.shape)
        ctx.save_for_backward(logits, target, highest, total)
        ctx.mesh, ctx.kernels = mesh, kernels
        return kernels.logarithm(total) - picked

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, target, highest, total = ctx.saved_tensors
        index = target.flatten() - ctx.mesh.rank * logits.shape[-1]
        gradient = gradients[0].float().flatten()
        dlogits = ctx.kernels.softmax_gradient(
            _rows(logits), index, highest.flatten(), total.flatten(), gradient, ctx.mesh.local
        )
        return dlogits.view(logits.shape), None, None, None


def _rows(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1]).contiguous()
