# SPDX-License-Identifier: Apache-2.0
"""Compute a weight gradient for autograd, or directly into Megatron's fp32 buffer.

A rank that holds the tokens of several context shards (numerics/sums/data_shards.py) has a gradient of each: the
first in `main_grad`, the others in `context_gradients`, which numerics/megatron/data_parallel.py gives a weight.

Where a backward pass is a leaf of the tree over data shards (numerics/sums/data_shards.py), it may add to each number
of a gradient only once, since (a + b) + c is not a + (b + c). Products, norms, biases and routers compute a whole
gradient before they add it; the embedding's rows are added up first. A second use of a weight in the pass would be a
second addition, and is an error.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.numerics.sums import later
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import all_gather, tree_sum, tree_sums

CONTEXTS = "context_gradients"  # attribute of a weight: gradients of the context shards after the first

LEAF = "backward_pass_is_a_leaf"  # attribute of a weight: a backward pass adds to each number of its gradient once

# (shape, dtype, device) -> a stand-in gradient; nobody reads it.
_stand_ins: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}


def forget_stand_ins() -> None:
    """Free their memory, one weight's, when a training has ended and another follows in the same process."""
    _stand_ins.clear()


def weight_gradient(weight: Tensor, *compute: Callable[[Tensor, bool], object], waits: bool = False) -> Tensor:
    """Compute a weight's gradient and return the tensor that a backward pass gives to autograd for the weight.

    Without `weight.main_grad` it returns the gradient, rounded once to the weight's dtype. With it (Megatron's fp32
    buffer) it adds the gradient there unrounded and returns a stand-in, so that the hooks on the weight still run;
    `grad_added_to_main_grad` tells them to ignore the stand-in's value.

    compute: one for each context shard of this rank, called as compute(out, add) with an fp32 tensor of the weight's
             shape to fill or to add to.
    waits:   whether it may be added later in the backward pass (numerics/sums/later.py).
    returns: the weight's shape and dtype.
    """
    if main_grad_of(weight) is None:
        gradients = torch.empty(len(compute), *weight.shape, dtype=torch.float32, device=weight.device)
        for fill, gradient in zip(compute, gradients, strict=True):
            fill(gradient, False)
        return tree_sum(gradients, weight.dtype)
    for add_to, gradient in zip(compute, gradients_of(weight), strict=True):
        if waits:
            later.GEMMS.add(partial(add_to, gradient, True))
        else:
            add_to(gradient, True)
    return added_to_main_grad(weight)


def added_by_itself(weight: Tensor) -> Tensor:
    """Return the weight, whose gradient is added to `main_grad` as soon as it is known.

    autograd would first add up, in the weight's dtype, what several uses of it in one backward pass give.
    """
    return _AddedByItself.apply(weight)


class _AddedByItself(LayerFunction):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        return weight_gradient(weight, lambda out, add: out.add_(gradients[0]) if add else out.copy_(gradients[0]))


def main_grad_of(weight: Any) -> Tensor | None:
    """Return `main_grad`, if Megatron has one for the weight. Megatron-FSDP makes it at its first use in a pass."""
    gradient = getattr(weight, "main_grad", None)
    if gradient is None and hasattr(weight, "get_main_grad"):
        gradient = weight.main_grad = weight.get_main_grad()
    return gradient


def gradients_of(weight: Any) -> list[Tensor]:
    """Return the fp32 buffers of a weight's gradient, one for each context shard of this rank."""
    return [weight.main_grad, *getattr(weight, CONTEXTS, ())]


def is_leaf(weight: Tensor) -> bool:
    """Whether a backward pass may add to each number of this weight's gradient only once."""
    return getattr(weight, LEAF, False)


def _check_alone(weight: Any) -> None:
    """Raise RuntimeError at a second gradient of a weight in one backward pass."""
    backward = torch._C._current_graph_task_id()
    if backward >= 0 and getattr(weight, "latest_backward", -1) == backward:
        raise RuntimeError(
            f"a weight of shape {[*weight.shape]} got two gradients in one backward pass. "
            "With numerics.data_shards > dp they would be added in another order: set numerics.data_shards to dp"
        )
    weight.latest_backward = backward


def added_to_main_grad(weight: Tensor) -> Tensor:
    """Tell Megatron that `weight.main_grad` already contains the gradient.

    Raises RuntimeError at a second gradient of the weight in a backward pass that is a leaf.

    returns: a gradient that nobody reads; zeros where Megatron would add it (tied embeddings: `zero_out_wgrad`).
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if is_leaf(weight):
        _check_alone(weight)
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    key = (weight.shape, weight.dtype, weight.device)
    stand_in = _stand_ins.get(key)
    if stand_in is None:
        # There is one stand-in for each shape, and all share the memory of the largest so far.
        largest = max((s for s in _stand_ins.values() if s.dtype == weight.dtype and s.device == weight.device),
                      key=Tensor.numel, default=None)  # fmt: skip
        if largest is not None and largest.numel() >= weight.numel():
            stand_in = largest.view(-1)[: weight.numel()].view(weight.shape)
        else:
            stand_in = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        _stand_ins[key] = stand_in
    return stand_in.detach()  # autograd takes a gradient without copying it only if it holds the sole reference


class _Leaves(NamedTuple):
    """A parameter, and the rest as of `reduce_weight_gradient`."""

    weight: Tensor
    leaves: Tensor
    mesh: VirtualMesh
    everywhere: bool
    by_heads: bool

    @property
    def kind(self) -> tuple[bool, bool, int, int]:
        """What parameters that are summed together have in common."""
        return self.everywhere, self.by_heads and self.mesh.contexts > 1, self.mesh.shards, self.mesh.contexts


def reduce_weight_gradient(
    weight: Tensor, leaves: Tensor, mesh: VirtualMesh, everywhere: bool, by_heads: bool = False
) -> Tensor:
    """Return the tensor that a backward pass returns to autograd for `weight`.

    leaves:     [n · V/t, L, size] fp32, of each of this rank's chunks of tokens L parts in order; [n · V, L, size] if
                `everywhere`; n is the number of context shards that the ranks hold, each of V chunks
                (`mesh.contexts`).
    everywhere: every rank has the partials of all shards, and Megatron does not sum the ranks' gradients. Otherwise
                Megatron sums them, so rank 0 has the sum and the others zeros.
    by_heads:   the shards are groups of heads instead: [n · V/t, L, size] has V/t groups for each context shard.

    With `weight.main_grad` (Megatron's fp32 buffer) the sum is added there when the backward pass ends; without it,
    it is made and returned at once. Either is a collective.
    """
    if main_grad_of(weight) is None:
        total = tree_sum(_total(tree_sums(leaves.contiguous()), mesh, everywhere, by_heads))
        if mesh.rank and not everywhere:
            total = torch.zeros_like(total)
        # + 0.0: where Megatron adds the other ranks' zeros, -0.0 becomes 0.0; so it must at t = 1.
        return (total + 0.0).to(weight.dtype).view(weight.shape)
    _waiting.add(_Leaves(weight, leaves, mesh, everywhere, by_heads))
    return added_to_main_grad(weight)


def finish_all() -> None:
    """Add up what waits, before backward passes end: for a bucket of gradients that is to be reduced meanwhile.

    It is a collective: all ranks of the mesh call it at the same place of the pass.
    """
    later.GEMMS.finish_all()
    _waiting.finish_all()


def forget() -> None:
    """Drop what a failed backward pass has left."""
    later.GEMMS.forget()
    _waiting.forget()


def _finish(waiting: list[_Leaves]) -> None:
    for kind in sorted({w.kind for w in waiting}):
        _add_up([w for w in waiting if w.kind == kind])


_waiting = later.Waiting[_Leaves](_finish)


def _add_up(alike: list[_Leaves]) -> None:
    """One tree for the parameters whose leaves have one shape, then one all-gather for all, which are of one kind."""
    everywhere, by_heads, *_ = alike[0].kind
    mesh, groups = alike[0].mesh, _by_count(alike)
    sums = _cat([tree_sums(_cat([alike[place].leaves for place in group], 2).contiguous()) for group in groups], 1)
    totals = _total(sums, mesh, everywhere, by_heads)
    if mesh.rank and not everywhere:
        return
    order = [place for group in groups for place in group]
    widths, rounds = [alike[place].leaves.shape[2] for place in order], _rounds(alike)
    of_contexts = zip(*(gradients_of(w.weight) for w in alike), strict=True)
    for total, gradients in zip(totals, of_contexts, strict=True):
        parts = dict(zip(order, total.split(widths), strict=True))
        for places in rounds:
            added = [parts[place].view(gradients[place].shape) for place in places]
            torch._foreach_add_([gradients[place] for place in places], added)


def _cat(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _by_count(waiting: list[_Leaves]) -> list[list[int]]:
    """Return the places of those whose leaves have as many rows, in an order that is the same on every rank."""
    counts = [w.leaves.shape[1] for w in waiting]
    return [[place for place, other in enumerate(counts) if other == count] for count in sorted({*counts})]


def _rounds(waiting: list[_Leaves]) -> list[list[int]]:
    """Places in `waiting` that may be added at once: of a weight used several times, one use a round, as they came."""
    rounds: list[list[int]] = []
    uses: dict[int, int] = {}
    for place, gradient in enumerate(waiting):
        use = uses[id(gradient.weight)] = uses.get(id(gradient.weight), -1) + 1
        if use == len(rounds):
            rounds.append([])
        rounds[use].append(place)
    return rounds


def _total(sums: Tensor, mesh: VirtualMesh, everywhere: bool, by_heads: bool) -> Tensor:
    """[k, size] of this rank's k chunks → [n, size]: the sum of all ranks' chunks, of each context shard."""
    n = mesh.contexts
    if everywhere or mesh.size == 1:
        return tree_sums(sums.unflatten(0, (n, -1)))
    # A rank's chunks of the tokens are whole context shards or a part of one; of heads it has a part of each shard.
    nodes = tree_sums(sums.unflatten(0, (n if by_heads else max(1, n // mesh.size), -1)))
    gathered = all_gather(nodes, mesh)
    if by_heads and n > 1:
        gathered = gathered.view(mesh.size, n, -1).transpose(0, 1).contiguous()
    return tree_sums(gathered.view(n, -1, sums.shape[1]))
