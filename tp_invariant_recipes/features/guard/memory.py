# SPDX-License-Identifier: Apache-2.0
"""What lies in memory, by digests, some tensors in turn.

Weights after the optimizer's all-gather are equal on all replicas. Between two steps nobody writes weights and state.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tp_invariant_recipes.features.guard.judge import Judge, SilentDataCorruption
from tp_invariant_recipes.kernels.digest import Lanes
from tp_invariant_recipes.kernels.launch import TensorPart
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.numerics.megatron import data_parallel
from tp_invariant_recipes.numerics.sums.weight_gradient import gradients_of
from tp_invariant_recipes.observe import module_hooks
from tp_invariant_recipes.observe.module_hooks import ModuleHooks
from tp_invariant_recipes.observe.optimizer_state import OptimizerState
from tp_invariant_recipes.observe.placement import Site
from tp_invariant_recipes.observe.shards import unwrapped

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

        def case() -> SilentDataCorruption | None:
            held = every.cpu()
            unequal = (held != held[:1]).any(2).any(0)
            if not bool(unequal.any()):
                return None
            first = int(unequal.nonzero()[0])
            suspects = minority([tuple(lane[first].tolist()) for lane in held])
            where = f"weights of {names[first]}, which differ between replicas"
            return SilentDataCorruption(evidence.REPLICAS, step, where, tuple(ranks[n] for n in suspects))

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

        def case() -> SilentDataCorruption | None:
            wrong = [name for name, changed in zip(names, unequal.tolist(), strict=True) if changed]
            if not wrong:
                return None
            where = f"{', '.join(wrong[:4])} changed in memory after the step"
            return SilentDataCorruption(evidence.MEMORY, step, where, (self.rank,), details={"tensors": wrong})

        self.judge.submit(case)


Event = tuple[str, tuple[int, ...]]  # an operation in words, and the lanes of what it has made

FORWARD, BACKWARD = "forward pass of", "backward pass at the"  # how the words begin


class _Hooks(ModuleHooks):
    """Hooks of the first micro-batches alone."""

    once = False  # two computations of the same are compared, in whatever places

    def __init__(self, site: Any, count: int) -> None:
        super().__init__(site, 0, frozenset(), None)
        self._count = count

    def record(self, key: Any, x: Tensor, module: Any, rule: Any, micro_batch: int) -> None:
        """As of ModuleHooks."""
        if micro_batch < self._count:
            super().record(key, x, module, rule, micro_batch)


@dataclass(frozen=True)
class BatchedSite(Site):
    """Where a rank stands that computes two data shards side by side. sites: where those stand that compute one."""

    sites: tuple[Site, ...] = ()

    @classmethod
    def from_sites(cls, *sites: Site) -> "BatchedSite":
        """Join sites with micro-batches of one size."""
        return cls(**vars(sites[0]) | {"samples": len(sites) * sites[0].samples, "sites": sites})

    def numbers(self, micro_batch: int) -> list[int] | None:
        """As of Site."""
        return [number for site in self.sites for number in site.numbers(micro_batch) or ()]


class ShardRecording:
    """Digests of the first data shard that a rank computes. names: parameter → name."""

    def __init__(self, model: list[Any], names: dict[Tensor, str], site: Any, count: int) -> None:
        self._model, self._names, self._count = model, names, count
        self._hooks = _Hooks(site, count)
        self._ended: dict[int, int] = {}
        self._gradients: list[tuple[str, Tensor]] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record within the block."""
        for chunk in self._model:
            self._hooks.hook(unwrapped(chunk))
        data_parallel.micro_batch_listener = self._micro_batch_ended
        try:
            yield
        finally:
            data_parallel.micro_batch_listener = None
            self._hooks.unhook()

    def _micro_batch_ended(self, model: Any) -> None:
        self._ended[id(model)] = ended = self._ended.get(id(model), 0) + 1
        if ended != self._count:
            return
        owners = set(unwrapped(model).parameters())
        pieces = [
            (name, piece)
            for owner, name in self._names.items()
            if owner in owners
            for gradient in gradients_of(owner)
            for piece in tables(gradient)
        ]
        lanes = Lanes([piece for _, piece in pieces])()
        self._gradients += [(name, lane) for (name, _), lane in zip(pieces, lanes, strict=True)]

    def events(self) -> list[Event]:
        """Return what was recorded, in order of execution; the host waits for it."""
        events: list[Event] = []
        for seen in self._hooks.seen():
            _, direction, module, tensor = seen.key
            if direction == module_hooks.BACKWARD:
                end = "input" if tensor.startswith("output") else "output"
                events.append((f"{BACKWARD} {end} of {module}", tuple(seen.lanes)))
            elif tensor.startswith("output"):
                events.append((f"{FORWARD} {module}", tuple(seen.lanes)))
        return [*events, *((f"weight gradient of {name}", tuple(lane.tolist())) for name, lane in self._gradients)]


def hash_of(events: list[Event]) -> str:
    """Return a digest of digests."""
    return hashlib.sha256(repr(events).encode()).hexdigest()


def first_unlike(own: list[Event], other: list[Event]) -> tuple[str, int] | None:
    """Return the first operation that differs, and its place."""
    for n, (a, b) in enumerate(itertools.zip_longest(own, other, fillvalue=("an operation that only one has", ()))):
        if a != b:
            return a[0], n
    return None


def added(own: list[Event], other: list[Event], both: list[Event]) -> list[Event]:
    """Return the events of two data shards side by side. A tensor may belong to no data shard."""
    events = []
    for (name, a), (_, b), (_, seen) in zip(own, other, both, strict=False):
        total = tuple((x + y + 2**63) % 2**64 - 2**63 for x, y in zip(a, b, strict=True))
        events.append((name, a if a == b == seen else total))
    return events
