"""Weights after the optimizer's all-gather are equal on all replicas: their digests, some parameters in turn."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.kernels.digest import Lanes, Piece
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.training.guard.fault import WrongBits
from tp_invariant_recipes.training.guard.judge import Judge

COLUMNS = 4096  # of a flat tensor as a table
TURNS = 16  # steps after which every parameter has had its turn


def tables(values: Tensor) -> list[Piece]:
    """A contiguous tensor as tables that a digest takes: whole rows, and what is left."""
    flat = values.detach().reshape(-1)
    whole = flat.numel() // COLUMNS * COLUMNS
    parts = (flat[:whole].view(-1, COLUMNS), flat[whole:].view(1, -1))
    return [Piece(part, 0, 0) for part in parts if part.numel()]


class Replicas:
    """The parameters of this rank, and the groups of ranks that hold the same.

    names: parameter → name, in one order on all replicas.
    """

    def __init__(self, names: dict[Tensor, str], judge: Judge, rank: int) -> None:
        from megatron.core import parallel_state

        self.judge, self.rank = judge, rank
        self._groups = [
            (parallel_state.get_data_parallel_group(with_context_parallel=True), _of(names, experts=False)),
            (parallel_state.get_expert_data_parallel_group(), _of(names, experts=True)),
        ]
        self._lanes: dict[tuple[int, int], tuple[list[str], Lanes]] = {}

    def compare(self, step: int, turns: range | None = None) -> None:
        """Have the digests of the step's turn compared with those of the other replicas. A collective of each group.

        turns: others than the step's own.
        """
        for turn in turns or range(step % TURNS, step % TURNS + 1):
            for number, (group, names) in enumerate(self._groups):
                some = list(names.items())[turn::TURNS]
                if some and group.size() > 1:
                    self._compare(step, group, *self._prepared(number, turn, some))

    def _prepared(self, group: int, turn: int, some: list[tuple[Tensor, str]]) -> tuple[list[str], Lanes]:
        if (group, turn) not in self._lanes:
            pieces = [(name, piece) for owner, name in some for piece in tables(owner)]
            self._lanes[group, turn] = [name for name, _ in pieces], Lanes([piece for _, piece in pieces])
        return self._lanes[group, turn]

    def _compare(self, step: int, group: Any, names: list[str], lanes: Lanes) -> None:
        ours = lanes()
        theirs = [torch.empty_like(ours) for _ in range(group.size())]
        dist.all_gather(theirs, ours, group=group)
        every = torch.stack(theirs)
        ranks = dist.get_process_group_ranks(group)

        def case() -> WrongBits | None:
            held = every.cpu()
            unequal = (held != held[:1]).any(2).any(0)
            if not bool(unequal.any()):
                return None
            first = int(unequal.nonzero()[0])
            suspects = minority([tuple(lane[first].tolist()) for lane in held])
            where = f"weights of {names[first]}, which differ between replicas"
            return WrongBits(evidence.REPLICAS, step, where, tuple(ranks[n] for n in suspects))

        self.judge.submit(case)


def minority(values: list[Any]) -> list[int]:
    """The places with another value than most places; all places where no value has a majority."""
    most = max(set(values), key=values.count)
    if 2 * values.count(most) <= len(values):
        return list(range(len(values)))
    return [n for n, value in enumerate(values) if value != most]


def _of(names: dict[Tensor, str], *, experts: bool) -> dict[Tensor, str]:
    return {owner: name for owner, name in names.items() if getattr(owner, "allreduce", True) is not experts}
