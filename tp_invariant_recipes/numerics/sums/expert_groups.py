# SPDX-License-Identifier: Apache-2.0
"""Expert groups: the order in which the gradients of experts are added, whichever ranks share their tokens.

The gradient of an expert's weight, bias or own adapter is a tree over X groups. Each group is one sum, term by term:

    X <= D    D/X consecutive data shards    for each sequence t of a shard, for each shard s, for each context shard c
    X > D     one data shard, and C·D/X consecutive context shards of it    for each sequence t, for each c

The shards of a group take their turns in the order of their reversed bits. Then every layout may add them, as data
shards of one rank come pass by pass, and those of several ranks in one pass:

    D = 4, X = 1   dp=4 ep=4   pass 0  0 2 1 3
                   dp=2 ep=2   pass 0  0 2      pass 1  1 3      rank 0 has the shards 0 and 1, rank 1 has 2 and 3
                   dp=1        passes  0 | 2 | 1 | 3

A place is where a run adds an expert's gradient: with ep > tp an owner gets the tokens of several context-parallel
ranks, then of several data-parallel ranks. A run may have any number of places up to X.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def reversed_bits(count: int) -> list[int]:
    """0 … count-1, a power of two, in the order of their reversed bits: 0, 2, 1, 3 of 4."""
    order = [0]
    while len(order) < count:
        order = [2 * n + odd for odd in (0, 1) for n in order]
    return order


def order_of_visits(shards: int, each: int, turns: int) -> list[int]:
    """Return the number of the sequence that a rank computes in each pass of a step.

    shards: of this rank, with `each` sequences, one after the other. turns: neighbours that take turns.
    """
    return [
        (first + shard) * each + t
        for first in range(0, shards, turns)
        for t in range(each)
        for shard in reversed_bits(turns)
    ]


@dataclass(frozen=True)
class ExpertGroups:
    """Which part of the sum over X groups a rank of a layout computes.

    groups, data, contexts: X, D, C. groups: None for the least that the layout can have.
    """

    groups: int | None
    data: int
    contexts: int
    tp: int
    cp: int
    dp: int
    ep: int

    @property
    def context_ranks(self) -> int:
        """Context-parallel ranks whose tokens an expert's owner gets."""
        return min(self.cp, max(1, self.ep // self.tp))

    @property
    def data_ranks(self) -> int:
        """Data-parallel ranks whose tokens it gets."""
        return max(1, self.ep // self.tp) // self.context_ranks

    @property
    def places(self) -> tuple[int, int]:
        """Places of one context shard and of one data shard."""
        return self.dp // self.data_ranks, self.cp // self.context_ranks

    @property
    def least(self) -> int:
        """The least X that this layout can have: its places; D for each place that context shards have, if several."""
        of_data, of_context = self.places
        return of_data if of_context == 1 else self.data * of_context

    @property
    def _of_each(self) -> tuple[int, int]:
        """Groups of data shards and of context shards."""
        groups = self.groups or self.least
        of_data = min(groups, self.data)
        return of_data, groups // of_data

    @property
    def fits(self) -> bool:
        """Whether no group has two places."""
        return all(places <= groups for places, groups in zip(self.places, self._of_each, strict=True))

    @property
    def turns(self) -> int:
        """Data shards of a rank that take turns, sequence by sequence."""
        return max(1, min(self.data // self.dp, self.data // self._of_each[0]))

    @property
    def spans(self) -> int:
        """Groups that a place has one after the other: the data shards of a rank, by turns."""
        return max(1, self.data // self.dp // self.turns)

    @property
    def data_buffers(self) -> int:
        """Groups of data shards that a place has in one pass: each has a buffer of its own."""
        return min(self._of_each[0] // self.places[0], self.data_ranks)

    @property
    def context_buffers(self) -> int:
        """Groups of context shards that a place has of each of these."""
        return self._of_each[1] // self.places[1]

    @property
    def chain(self) -> tuple[int, ...]:
        """The sources of one buffer in the order in which a pass adds them, as numbers of consecutive sources.

        A source is the tokens of a context shard of a data-parallel rank; all of a rank come first.
        """
        contexts = self.contexts // self.cp * self.context_ranks // self.context_buffers
        ranks = reversed_bits(self.data_ranks // self.data_buffers)
        return tuple(rank * contexts + context for rank in ranks for context in range(contexts))

    @classmethod
    def of_ranks(cls, config: Any, dp: int) -> "ExpertGroups":
        """Of a TransformerConfig. dp: data-parallel ranks."""
        degrees = ("tensor_model", "context", "expert_model")
        tp, cp, ep = (getattr(config, f"{name}_parallel_size") for name in degrees)
        groups, data = (getattr(config, name, None) for name in ("expert_groups", "data_shards"))
        return cls(groups, data or dp, getattr(config, "context_shards", cp), tp, cp, dp, ep)


def visits_of(config: Any) -> tuple[int, ...]:
    """Return the sequence of a rank that each pass of a training step computes; empty: they are computed in their
    order.

    config: a TransformerConfig. Megatron must know the ranks and the number of micro-batches.
    """
    if getattr(config, "expert_groups", None) is None:
        return ()
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    ranks = parallel_state.get_data_parallel_world_size()
    turns, shards = ExpertGroups.of_ranks(config, ranks).turns, config.data_shards // ranks
    visits = tuple(order_of_visits(shards, get_num_microbatches() // shards, turns))
    return visits if visits != tuple(range(len(visits))) else ()


# The sequence that each pass of the step computes that runs now; empty: they are computed in their order.
_visits: list[Sequence[int]] = [()]


def enter(visits: Sequence[int]) -> None:
    """Begin a step, or with () end the last one."""
    _visits[0] = visits


def visited(number: int) -> int:
    """Return the sequence of the rank that a pass of this step computes. number: of the pass."""
    return _visits[0][number] if _visits[0] else number
