"""Products of a chunk of tokens each: a rank multiplies its slice of the sequence by the whole weight.

Only the sum of the weight gradient crosses ranks, a tree over V chunks of the sequence:

    partial_linear     every rank holds the weight whole, and adds its slice of the gradient
    gathered_linear    each rank holds some rows of a small weight, gathers the others, and gets the gradient of its own
"""

from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.numerics.products.product import product
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.peer_memory import PeerSum
from tp_invariant_recipes.numerics.sums.tree import Reducing, all_gather, start_reduce_scatter
from tp_invariant_recipes.numerics.sums.weight_gradient import added_to_main_grad


def partial_linear(x: Tensor, weight: Tensor, mesh: VirtualMesh) -> Tensor:
    """x @ weight^T, chunk of tokens by chunk, for a weight that every rank holds whole.

    x:       [s/t, b, k], this rank's V/t chunks of the sequence; weight: [n, k].
    returns: [s/t, b, n] of x's dtype.

    The weight gradient is a tree over V chunks. Each rank adds its slice of the sum to `main_grad`, of which Megatron
    adds up all ranks': elsewhere they have zeros. Without `main_grad` it is returned so.
    """
    return _ChunkedLinear.apply(x, weight, mesh, False, False)


def add_slice(weight: Tensor, mine: Tensor, rank: int) -> Tensor:
    """Return the gradient of a weight that every rank holds whole: slice `rank` of the flat sum, [n] fp32, and zeros.

    With `main_grad` it is added there, and the result is what a backward pass returns to autograd.
    """
    start = rank * len(mine)
    if getattr(weight, "main_grad", None) is None:
        total = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
        total[start : start + len(mine)] += mine  # 0.0 + -0.0 is 0.0, on one rank as on several
        return total.to(weight.dtype).view(weight.shape)
    weight.main_grad.view(-1)[start : start + len(mine)].add_(mine)  # type: ignore[attr-defined]
    return added_to_main_grad(weight)


def gathered_linear(x: Tensor, weight: Tensor, mesh: VirtualMesh, sequence_parallel: bool) -> Tensor:
    """x @ weight^T, chunk of tokens by chunk, for a small weight whose rows are split over the ranks.

    x:       [s/t, b, k] with sequence parallelism, this rank's V/t chunks; [s, b, k] without, all V chunks.
    weight:  [n/t, k], this rank's rows of [n, k].
    returns: [s/t or s, b, n] of x's dtype.

    The weight gradient is a tree over V chunks, of which each rank gets its rows; `main_grad` gets them unrounded.
    """
    return _ChunkedLinear.apply(x, weight, mesh, not sequence_parallel, True)


class _ChunkedLinear(LayerFunction):
    """everywhere: x has all tokens. gathers: ranks hold rows of the weight, and get those of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, mesh: VirtualMesh, everywhere: bool, gathers: bool) -> Tensor:
        whole = all_gather(weight, mesh) if gathers else weight
        ctx.save_for_backward(x, weight, whole)
        ctx.mesh, ctx.everywhere, ctx.gathers = mesh, everywhere, gathers
        ctx.chunks = mesh.shards if everywhere else mesh.local_chunks
        rows = x.reshape(-1, x.shape[-1])
        out = rows.new_empty(len(rows), len(whole))
        return product(rows, whole.t(), out, rows=ctx.chunks).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, whole = ctx.saved_tensors
        mesh = ctx.mesh
        grad, rows = dy.reshape(-1, len(whole)), x.reshape(-1, x.shape[-1])
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        reducing = dx = dw = None
        if wants_dw:
            parts, part = (mesh.size, mesh.rank) if ctx.everywhere else (1, 0)
            reducing = _start_weight_gradient(grad.chunk(parts)[part], rows.chunk(parts)[part], mesh)
        if wants_dx:  # while the sums are on their way
            dx = product(grad, whole, torch.empty_like(rows), rows=ctx.chunks).view(x.shape)
        if reducing is not None:
            total = reducing.finished(torch.float32)
            dw = _kept_rows(weight, total) if ctx.gathers else add_slice(weight, total.view(-1), mesh.rank)
        return dx, dw, None, None, None


def _kept_rows(weight: Any, total: Tensor) -> Tensor:
    total = total.view(weight.shape)
    if getattr(weight, "main_grad", None) is None:
        return total.to(weight.dtype)
    weight.main_grad.add_(total)
    return added_to_main_grad(weight)


def _start_weight_gradient(grad: Tensor, rows: Tensor, mesh: VirtualMesh) -> Reducing | PeerSum:
    """grad: [tokens/t, n]; rows: [tokens/t, k]. Its result is slice `rank` of the flat sum, [1, n · k / t] in fp32."""
    count = mesh.local_chunks
    node = _subtree(grad.chunk(count), rows.chunk(count), 0, count)
    return start_reduce_scatter(node.view(1, mesh.size, -1), mesh)


def _subtree(grads: tuple[Tensor, ...], rows: tuple[Tensor, ...], first: int, count: int) -> Tensor:
    """Return the sum of `count` chunks' products in tree order, with one buffer a level of the tree."""
    if count > 2:
        subtree = _subtree(grads, rows, first, count // 2)
        return subtree.add_(_subtree(grads, rows, first + count // 2, count // 2))
    node = rows[0].new_empty(grads[0].shape[1], rows[0].shape[1], dtype=torch.float32)
    for chunk in range(count):  # adding to the output rounds as a separate addition would
        product(grads[first + chunk].t(), rows[first + chunk], node, add=chunk > 0)
    return node
