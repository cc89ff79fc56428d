"""Gradients of parameters that every rank has whole (norm weights, biases): a tree sum of V partials.

The partials of all these parameters wait until the backward pass ends, then are added up side by side, with one
all-gather for them all: a collective for each parameter would cost more than what it moves.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tp_invariant_recipes.kernels.tree_add import tree_add
from tp_invariant_recipes.numerics.mesh import VirtualMesh
from tp_invariant_recipes.numerics.tree import tree_all_reduce, tree_sum
from tp_invariant_recipes.numerics.weight_gradient import added_to_main_grad


@dataclass(frozen=True)
class _Waiting:
    """A parameter and its partials: sums is [V/t, size] fp32, or [V, size] if `everywhere`."""

    weight: Tensor
    sums: Tensor
    mesh: VirtualMesh
    everywhere: bool


# By backward pass: one that failed leaves its own behind, which no other may take for its.
_waiting: dict[int, list[_Waiting]] = {}


def deliver(weight: Tensor, leaves: Tensor, mesh: VirtualMesh, everywhere: bool) -> Tensor:
    """What a backward pass returns to autograd for `weight`.

    leaves:     [V/t, L, size] fp32, of each of this rank's shards L parts in order; [V, L, size] if `everywhere`.
    everywhere: every rank has the partials of all shards, and Megatron does not add the ranks' gradients up. Otherwise
                it does, so rank 0 has the sum and the others zeros.

    With `weight.main_grad` (Megatron's fp32 buffer) the sum is added there when the backward pass ends; without it,
    it is made and returned at once. Either is a collective.
    """
    sums = tree_add(leaves, torch.empty_like(leaves[:, 0]))
    if getattr(weight, "main_grad", None) is None:
        total = tree_sum(sums) if everywhere else tree_all_reduce(sums, mesh, torch.float32)
        if mesh.rank and not everywhere:
            total = torch.zeros_like(total)
        # + 0.0: where Megatron adds the other ranks' zeros, -0.0 becomes 0.0; so it must at t = 1.
        return (total + 0.0).to(weight.dtype).view(weight.shape)
    backward = torch._C._current_graph_task_id()
    if backward not in _waiting:
        _waiting[backward] = []
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _finish(backward))
    _waiting[backward].append(_Waiting(weight, sums, mesh, everywhere))
    return added_to_main_grad(weight)


def _finish(backward: int) -> None:
    waiting = _waiting.pop(backward)
    for kind in sorted({(w.everywhere, w.mesh.shards) for w in waiting}):
        _add_up([w for w in waiting if (w.everywhere, w.mesh.shards) == kind])


@torch.no_grad()
def _add_up(waiting: list[_Waiting]) -> None:
    mesh, everywhere = waiting[0].mesh, waiting[0].everywhere
    sums = torch.cat([w.sums for w in waiting], 1)
    total = tree_sum(sums) if everywhere else tree_all_reduce(sums, mesh, torch.float32)
    if everywhere or mesh.rank == 0:
        parts = total.split([w.sums.shape[1] for w in waiting])
        gradients = [w.weight.main_grad for w in waiting]  # type: ignore[attr-defined]
        torch._foreach_add_(gradients, [part.view(g.shape) for part, g in zip(parts, gradients, strict=True)])
