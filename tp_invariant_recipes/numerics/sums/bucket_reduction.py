# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over data-parallel ranks: collectives move bytes, and one tree adds.

With n ranks, each has a partial; rank r gets slice r of every rank's partial and adds them in rank order, neighbours
first. A buffer goes in pieces, so that memory does not grow with it:

    rank 0  [ a0 | a1 | a2 | a3 ]        rank 2 gets a2, b2, c2, d2 and has (a2 + b2) + (c2 + d2)
    rank 1  [ b0 | b1 | b2 | b3 ]
    …

While a piece is added, the next one is on its way. A ring's reduce-scatter moves the same bytes.

With context shards (numerics/sums/data_shards.py) a rank has n partials, one for each of its shards. The tree adds
each shard over the data-parallel ranks, then the shards:

    cp=2, dp=2, n=1    ranks are (dp 0, cp 0), (dp 0, cp 1), (dp 1, cp 0), (dp 1, cp 1): (a + c) + (b + d)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.kernels.tree_add import tree_add
from tp_invariant_recipes.numerics.sums.symmetric_memory import DATA, peers_of
from tp_invariant_recipes.numerics.sums.tree import Moving


@dataclass(frozen=True)
class SequencePass:
    """A forward pass over one sequence of a row, and its backward pass, which may compute the forward pass again.

    row, number: of the row in this process, and of the sequence in its row.
    idle:        whether the pass only takes part in the experts' exchanges: it routes no token, and counts nowhere.
    loss_share:  factor of an auxiliary loss: the sequence's part of the row's tokens, where the main loss is a row's
                 mean; 1 where losses are divided by the tokens of a step.
    metric_share: factor of an auxiliary loss in the log, which has one value a row.
    """

    row: int
    number: int
    idle: bool = False
    loss_share: float = 1.0
    metric_share: float = 1.0


_current: list[SequencePass | None] = [None]


def current() -> SequencePass | None:
    """Return the pass that runs; None: rows are not packed."""
    return _current[0]


def enter(now: SequencePass | None) -> None:
    """Begin a pass, or end the last one of a row."""
    _current[0] = now


PIECE = 2**24  # numbers that are on their way together; two pieces in fp32 take 128 MiB


@torch.no_grad()
def reduce_scatter(
    partials: Sequence[Tensor], group: Any, cp: int = 1, copies: int = 1, parts: Sequence[slice] = ()
) -> None:
    """Add all ranks' partials in tree order, for this rank's part of them.

    partials: [m] fp32 each, contiguous; the group's size is a power of two. Part `rank` of the first becomes the sum;
              the other parts are undefined afterwards.
    cp:       ranks of the group that have different context shards of the same sequences.
    copies:   consecutive ranks of the group with the same tokens, of which one has the gradient and the others zeros.
    parts:    of the ranks, in order, of any size; none: slices of m / size, where the size divides m.
    """
    size, flat = group.size(), [partial.view(-1) for partial in partials]
    if size == 1:
        _add_here(partials)
        return
    of_rank = flat[0].numel() // size
    parts = parts or [slice(rank * of_rank, (rank + 1) * of_rank) for rank in range(size)]
    width, mine = max(1, PIECE // size // len(flat)), flat[0][parts[group.rank()]]
    cuts = range(0, max(part.stop - part.start for part in parts), width)
    pieces = ([[partial[part][cut : cut + width] for part in parts] for partial in flat] for cut in cuts)
    for cut, arrived in zip(cuts, _exchanged(pieces, group), strict=True):
        if arrived[0].numel():
            tree_add(_by_context(arrived, cp, copies), mine[cut : cut + width])


@torch.no_grad()
def all_reduce(partials: Sequence[Tensor], group: Any, cp: int = 1, copies: int = 1) -> None:
    """Add all ranks' partials in tree order, on every rank. The first partial becomes the sum.

    partials: [m] fp32 each, contiguous; the group's size is a power of two. cp, copies: as for `reduce_scatter`.
    """
    size, first = group.size(), partials[0]
    whole = first.numel() // size * size
    reduce_scatter([partial[:whole] for partial in partials], group, cp, copies)
    if size > 1 and whole:
        dist.all_gather_into_tensor(first[:whole], first[:whole].view(size, -1)[group.rank()], group=group)
    if whole < first.numel():
        rest = torch.stack([partial[whole:] for partial in partials])
        gathered = rest.new_empty(size * len(rest), rest.shape[1])
        dist.all_gather_into_tensor(gathered, rest, group=group)
        tree_add(_by_context(gathered.view(size, *rest.shape).unbind(1), cp, copies), first[whole:])


def _add_here(partials: Sequence[Tensor]) -> None:
    sums = list(partials)
    while len(sums) > 1:
        for total, addend in zip(sums[::2], sums[1::2], strict=True):
            total.add_(addend)
        sums = sums[::2]


def _by_context(arrived: Sequence[Tensor], cp: int, copies: int) -> Tensor:
    """Return the leaves of the tree, by context shard, then data-parallel rank.

    arrived: [dp · cp · copies, c] of each context shard of a rank. returns: [cp · n · dp · copies, c], contiguous.
    """
    if cp == 1 and len(arrived) == 1:
        return arrived[0]
    width = arrived[0].shape[1]
    shards = torch.stack([row.view(-1, cp, copies, width) for row in arrived])
    return shards.permute(2, 0, 1, 3, 4).reshape(-1, width)


def _exchanged(pieces: Iterable[Sequence[Sequence[Tensor]]], group: Any) -> Iterator[list[Tensor]]:
    """Row `rank` of every rank's pieces: [size, c], c of that row, for each of this rank. One is on its way ahead."""
    ahead: list[Moving] = []
    for rows in pieces:
        following = [_start(piece, group) for piece in rows]
        if ahead:
            yield [moving.arrived() for moving in ahead]
        ahead = following
    if ahead:
        yield [moving.arrived() for moving in ahead]


def _start(piece: Sequence[Tensor], group: Any) -> Moving:
    mine = piece[group.rank()]
    # Copy engines leave the multiprocessors to the GEMMs of the backward pass.
    peers = peers_of(group, mine, 4 * max(map(len, piece)), DATA)
    if peers is not None and (exchange := peers.start_exchange(piece)) is not None:
        return Moving(exchange.inbox, (exchange,))
    arrived = mine.new_empty(len(piece), mine.numel())
    if dist.get_backend(group) == "nccl":  # it takes the rows where they lie
        work = dist.all_to_all([*arrived], [*piece], group=group, async_op=True)
    else:
        sizes = [row.numel() for row in piece]
        came = [mine.numel()] * len(piece)
        work = dist.all_to_all_single(arrived.view(-1), torch.cat([*piece]), came, sizes, group=group, async_op=True)
    return Moving(arrived, (work,))
