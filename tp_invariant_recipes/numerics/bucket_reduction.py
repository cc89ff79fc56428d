"""Sums of gradients over data-parallel ranks: collectives move bytes, and one tree adds.

With n ranks, each has a partial; rank r gets slice r of every rank's partial and adds them in rank order, neighbours
first. A buffer goes in pieces, so that memory does not grow with it:

    rank 0  [ a0 | a1 | a2 | a3 ]        rank 2 gets a2, b2, c2, d2 and has (a2 + b2) + (c2 + d2)
    rank 1  [ b0 | b1 | b2 | b3 ]
    …

While a piece is added, the next one is on its way. A ring's reduce-scatter moves the same bytes.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.kernels.tree_add import tree_add
from tp_invariant_recipes.numerics.tree import Moving

PIECE = 2**24  # numbers that are on their way together; two pieces in fp32 take 128 MiB


@torch.no_grad()
def reduce_scatter(partial: Tensor, group: Any) -> None:
    """Add all ranks' partials in tree order, for this rank's slice of them.

    partial: [n] fp32, contiguous; the group's size, a power of two, divides n. Slice `rank` of it becomes the sum; the
             other slices are undefined afterwards.
    """
    size, rank = group.size(), group.rank()
    if size == 1:
        return
    slices = partial.view(size, -1)
    width = max(1, PIECE // size)
    cuts = range(0, slices.shape[1], width)
    for number, arrived in enumerate(_exchanged((slices[:, cut : cut + width] for cut in cuts), group)):
        tree_add(arrived, slices[rank, number * width : (number + 1) * width])


@torch.no_grad()
def all_reduce(partial: Tensor, group: Any) -> None:
    """Add all ranks' partials in tree order, on every rank, in place.

    partial: [n] fp32, contiguous; the group's size is a power of two.
    """
    size = group.size()
    if size == 1:
        return
    whole = partial.numel() // size * size
    pieces = list(partial[:whole].split(max(1, PIECE // size) * size)) if whole else []
    if whole < partial.numel():
        rest = partial.new_zeros(size)
        rest[: partial.numel() - whole] = partial[whole:]
        pieces.append(rest)
    for piece, arrived in zip(pieces, _exchanged((p.view(size, -1) for p in pieces), group), strict=True):
        mine = tree_add(arrived, piece.new_empty(piece.numel() // size))
        dist.all_gather_into_tensor(piece, mine, group=group)
    if whole < partial.numel():
        partial[whole:] = pieces[-1][: partial.numel() - whole]


def _exchanged(pieces: Iterator[Tensor], group: Any) -> Iterator[Tensor]:
    """Row `rank` of every rank's pieces: [size, c] for each [size, c] of this rank. One is on its way ahead."""
    ahead: Moving | None = None
    for piece in pieces:
        following = _start(piece, group)
        if ahead is not None:
            yield ahead.arrived()
        ahead = following
    if ahead is not None:
        yield ahead.arrived()


def _start(piece: Tensor, group: Any) -> Moving:
    arrived = torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)
    if piece.is_cuda and not piece.is_contiguous():  # NCCL takes the rows where they lie; Gloo takes no lists
        return Moving(arrived, dist.all_to_all([*arrived], [*piece], group=group, async_op=True))
    return Moving(arrived, dist.all_to_all_single(arrived, piece.contiguous(), group=group, async_op=True))
