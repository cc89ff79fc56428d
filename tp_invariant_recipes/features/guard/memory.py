"""What lies in memory, by digests, some tensors in turn.

Weights after the optimizer's all-gather are equal on all replicas. Between two steps nobody writes weights and state.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tp_invariant_recipes.features.guard.judge import Judge, WrongBits
from tp_invariant_recipes.kernels.digest import Lanes
from tp_invariant_recipes.kernels.launch import TensorPart
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.observe.optimizer_state import OptimizerState

COLUMNS = 4096  # of a flat tensor as a table
TURNS = 16  # steps after which every tensor has had its turn


def tables(values: Tensor) -> list[TensorPart]:
    """Return a contiguous tensor as tables that a digest takes: whole rows, and what is left."""
    flat = values.detach().reshape(-1)
    whole = flat.numel() // COLUMNS * COLUMNS
    parts = (flat[:whole].view(-1, COLUMNS), flat[whole:].view(1, -1))
    return [TensorPart(part, 0, 0) for part in parts if part.numel()]


class NamedLanes:
    """Lanes of tensors, with a name for each lane; prepared once for as long as the tensors stay where they are."""

    def __init__(self) -> None:
        self._prepared: dict[Any, tuple[tuple[int, ...], list[str], Lanes]] = {}

    def prepare(self, key: Any, named: Iterable[tuple[str, Tensor]]) -> tuple[list[str], Lanes]:
        """Return names, and what takes the lanes. key: of this set of tensors."""
        named = list(named)
        where = tuple(values.data_ptr() for _, values in named)
        if key not in self._prepared or self._prepared[key][0] != where:
            pieces = [(name, piece) for name, values in named for piece in tables(values)]
            self._prepared[key] = where, [name for name, _ in pieces], Lanes([piece for _, piece in pieces])
        return self._prepared[key][1:]


class Replicas:
    """The parameters of this rank, and the groups of ranks that hold the same. names: in one order on all replicas."""

    def __init__(self, names: dict[Tensor, str], judge: Judge) -> None:
        self.judge, self._lanes = judge, NamedLanes()
        of_experts = {owner: not getattr(owner, "allreduce", True) for owner in names}
        self._groups = [
            (group, [(name, owner) for owner, name in names.items() if of_experts[owner] is experts])
            for group, experts in (
                (parallel_state.get_data_parallel_group(with_context_parallel=True), False),
                (parallel_state.get_expert_data_parallel_group(), True),
            )
        ]

    def compare(self, step: int, turns: range | None = None) -> None:
        """Compare the digests of the step's turn, or of `turns`, with other replicas'. A collective of each group."""
        for turn in turns or range(step % TURNS, step % TURNS + 1):
            for number, (group, named) in enumerate(self._groups):
                if named[turn::TURNS] and group.size() > 1:
                    self._compare(step, group, *self._lanes.prepare((number, turn), named[turn::TURNS]))

    def _compare(self, step: int, group: Any, names: list[str], lanes: Lanes) -> None:
        own = lanes()
        of_ranks = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(of_ranks, own, group=group)
        every = torch.stack(of_ranks)
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


def minority(values: Sequence[Any]) -> list[int]:
    """Return the places with another value than most places; all places where no value has a majority."""
    most = max(set(values), key=values.count)
    if 2 * values.count(most) <= len(values):
        return list(range(len(values)))
    return [n for n, value in enumerate(values) if value != most]


class Memory:
    """Part of the weights and of the optimizer's state after a step, and before the next. names: of parameters."""

    def __init__(self, state: OptimizerState, names: dict[Tensor, str], judge: Judge, rank: int) -> None:
        self.state, self.names, self.judge, self.rank = state, names, judge, rank
        self._lanes, self._ready = NamedLanes(), False
        self._taken: tuple[int, list[str], Lanes, Tensor] | None = None

    def leave(self, step: int, *, weights: bool, whole: bool) -> None:
        """Take the digests after a step.

        weights: also of the model's, which are not still on their way. whole: of all, not of the step's turn alone.
        """
        for turn in [] if self._ready else range(TURNS):  # now, since a later step would be slower than the others
            self._lanes_of(turn, weights=weights)
        self._ready = True
        named, lanes = self._lanes_of(None if whole else step % TURNS, weights=weights)
        if named:
            self._taken = step, named, lanes, lanes()

    def _lanes_of(self, turn: int | None, *, weights: bool) -> tuple[list[str], Lanes]:
        named = [
            (f"{kind} of {self.names.get(slot.owner, 'a parameter')}", values)
            for slot in (self.state.slots if turn is None else self.state.slots[turn::TURNS])
            for kind, values in (("master weights", slot.updated), *slot.state.items(), ("weights", slot.owner))
            if kind != "weights" or (weights and slot.master)
        ]
        return self._lanes.prepare(turn, named)

    def look(self) -> None:
        """Take them again before the next step, and have them compared."""
        if self._taken is None:
            return
        (step, names, lanes, then), self._taken = self._taken, None
        unequal = (lanes() != then).any(1)

        def case() -> WrongBits | None:
            wrong = [name for name, changed in zip(names, unequal.tolist(), strict=True) if changed]
            if not wrong:
                return None
            where = f"{', '.join(wrong[:4])} changed in memory after the step"
            return WrongBits(evidence.MEMORY, step, where, (self.rank,), details={"tensors": wrong})

        self.judge.submit(case)
