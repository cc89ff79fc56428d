# SPDX-License-Identifier: Apache-2.0
"""Products of adapters of experts (LoRA): one matrix for all experts of a layer, or one for each expert.

An expert's owner has its tokens from the whole micro-batch, as in numerics/layers/experts/experts.py. A matrix of each
expert is trained as the expert's own weight. One for all experts is a weight that every rank holds, as the router's;
its gradient for a micro-batch is a sum over experts. With E experts and P, the largest power of two that divides E:

    leaf         the GEMM of an expert's tokens, all of one source
    node         E/P experts, one after the other
    gradient     a tree over P nodes, in the order of the experts' numbers

An owner has P/size consecutive nodes of each source. It adds them and sends each rank the part that is the rank's: of
the rank's own tokens, a slice of the weight. So tp and ep decide only who adds which nodes.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.numerics.layers.experts.expert_placement import ExpertHosts
from tp_invariant_recipes.numerics.layers.experts.experts import of_batches
from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import Batches
from tp_invariant_recipes.numerics.layers.formats.plain import PLAIN
from tp_invariant_recipes.numerics.layers.linear import add_slice
from tp_invariant_recipes.numerics.sums.tree import tree_sum
from tp_invariant_recipes.numerics.sums.weight_gradient import added_to_main_grad, gradients_of, main_grad_of


def adapter_linear(x: Tensor, weight: Tensor, batches: Batches, owners: ExpertHosts) -> Tensor:
    """x @ weight^T, batch by batch.

    x:       [r, k], rows in order of batches.
    weight:  [n, k], the same for all experts, and on all ranks; n · k is a multiple of tp. Or [e, n, k], one for each
             of the e experts that this rank holds.
    returns: [r, n] of x's dtype.

    The gradient of one weight for all is a slice of it on each rank of a tensor-parallel group, and zeros elsewhere:
    Megatron adds up the ranks'. Its sum is a collective of the owners' group.
    """
    return _AdapterLinear.apply(x, weight, batches, owners)


class _AdapterLinear(LayerFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, batches: Batches, owners: ExpertHosts) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.batches, ctx.owners = batches, owners
        out = x.new_empty(len(x), weight.shape[-2])
        return PLAIN.multiply_groups(x, _each(weight, batches), out, batches.groups, forward=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        batches, dy = ctx.batches, gradients[0].contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            dx = PLAIN.multiply_groups(dy, _each(weight, batches), dx, batches.groups, forward=False)
        if ctx.needs_input_grad[1]:
            of_kind = _shared_gradient if weight.dim() == 2 else _separate_gradient
            dw = of_kind(dy, x, weight, batches, ctx.owners)
        return dx, dw, None, None


def _each(weight: Tensor, batches: Batches) -> list[Tensor]:
    if weight.dim() == 2:
        return [weight] * len(batches.groups.sizes)
    return of_batches(batches, weight.unbind(0))


def _separate_gradient(dy: Tensor, x: Tensor, weight: Any, batches: Batches, owners: ExpertHosts) -> Tensor:
    """Of [e, n, k], as experts.weight_gradients."""
    plain = None
    if main_grad_of(weight) is None:
        plain = torch.zeros(batches.buffers, *weight.shape, dtype=torch.float32, device=x.device)
    buffers = gradients_of(weight) if plain is None else plain.unbind(0)
    PLAIN.add_gradients(dy, (x,), [buffer[expert] for expert in batches.experts for buffer in buffers], batches)
    return added_to_main_grad(weight) if plain is None else tree_sum(plain, weight.dtype)


def _shared_gradient(dy: Tensor, x: Tensor, weight: Tensor, batches: Batches, owners: ExpertHosts) -> Tensor:
    """Of [n, k]. This rank's slice of the sum over the experts of all owners, for its own tokens."""
    within = owners.experts // (owners.experts & -owners.experts)
    leaves = torch.zeros(
        within, owners.each // within, batches.sources, weight.numel(), dtype=torch.float32, device=x.device
    )
    outs = []
    for batch in range(len(batches.groups.sizes)):
        node, leaf = divmod(batches.expert(batch) - batches.first, within)
        outs.append(leaves[leaf, node, batches.source(batch)].view(weight.shape))
    PLAIN.add_gradients(dy, (x,), outs, replace(batches, chain=(0,)))
    nodes = leaves[0]
    for later in leaves[1:]:
        nodes.add_(later)
    total = tree_sum(nodes)  # [sources, n · k]
    if owners.group is not None:
        arrived = torch.empty_like(total).view(owners.size, -1)
        dist.all_to_all_single(arrived, total.view(owners.size, -1), group=owners.group)
        total = tree_sum(owners.in_order(arrived))
    slices = weight.numel() // total.numel()
    return add_slice(weight, total.view(-1), owners.rank % slices)
