"""Gradients of parameters that every rank holds whole (norm weights, biases): a tree sum of V partials.

The partials of all these parameters wait until the end of the backward pass and are then summed together with one
all-gather: a collective for each parameter would cost more than moving its bytes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import outside_modes
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import all_gather, tree_sum, tree_sums
from tp_invariant_recipes.numerics.sums.weight_gradient import added_to_main_grad, gradients_of


class _Waiting(NamedTuple):
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


# By backward pass: a failed pass leaves its entries behind, and no other pass may use them.
_waiting: dict[int, list[_Waiting]] = {}


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
    if getattr(weight, "main_grad", None) is None:
        total = tree_sum(_total(tree_sums(leaves.contiguous()), mesh, everywhere, by_heads))
        if mesh.rank and not everywhere:
            total = torch.zeros_like(total)
        # + 0.0: where Megatron adds the other ranks' zeros, -0.0 becomes 0.0; so it must at t = 1.
        return (total + 0.0).to(weight.dtype).view(weight.shape)
    backward = torch._C._current_graph_task_id()
    if backward not in _waiting:
        _waiting[backward] = []
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _finish(backward))
    _waiting[backward].append(_Waiting(weight, leaves, mesh, everywhere, by_heads))
    return added_to_main_grad(weight)


def finish_all() -> None:
    """Add up what waits, before backward passes end: for a bucket of gradients that is to be reduced meanwhile.

    It is a collective: all ranks of the mesh call it at the same place of the pass.
    """
    for backward in list(_waiting):
        _finish(backward)


def forget() -> None:
    """Drop what a failed backward pass has left."""
    _waiting.clear()


@torch.no_grad()
@outside_modes
def _finish(backward: int) -> None:
    waiting = _waiting.pop(backward, [])
    for kind in sorted({w.kind for w in waiting}):
        _add_up([w for w in waiting if w.kind == kind])


def _add_up(alike: list[_Waiting]) -> None:
    """One tree for the parameters whose leaves have one shape, then one all-gather for all, which are of one kind."""
    everywhere, by_heads, *_ = alike[0].kind
    mesh, groups = alike[0].mesh, _by_count(alike)
    sums = torch.cat([tree_sums(torch.cat([alike[place].leaves for place in group], 2)) for group in groups], 1)
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


def _by_count(waiting: list[_Waiting]) -> list[list[int]]:
    """Return the places of those whose leaves have as many rows, in an order that is the same on every rank."""
    counts = [w.leaves.shape[1] for w in waiting]
    return [[place for place, other in enumerate(counts) if other == count] for count in sorted({*counts})]


def _rounds(waiting: list[_Waiting]) -> list[list[int]]:
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
