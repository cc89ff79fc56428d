"""Digests of what a rank computes of a data shard: of every module's tensors, both ways, and of weight gradients."""

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tp_invariant_recipes.features.guard.memory import tables
from tp_invariant_recipes.kernels.digest import Lanes
from tp_invariant_recipes.numerics.megatron import data_parallel
from tp_invariant_recipes.numerics.sums.weight_gradient import gradients_of
from tp_invariant_recipes.observe import module_hooks
from tp_invariant_recipes.observe.module_hooks import ModuleHooks
from tp_invariant_recipes.observe.placement import Site
from tp_invariant_recipes.observe.shards import unwrapped

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
