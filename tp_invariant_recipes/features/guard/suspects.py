"""Which of the ranks that differ in a shadow step is wrong."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tp_invariant_recipes.features.guard.fault import WrongBits
from tp_invariant_recipes.features.guard.shard_recording import BACKWARD, FORWARD
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.observe.gathering import gathered


@dataclass(frozen=True)
class ReplicaPair:
    """Two replicas that have computed the same data shard, by their places in the data-parallel group, and the first
    operation that differs; None: none does. depth: its place in the order of execution."""

    own: int
    shadow: int
    first: str | None
    depth: int = 0


@dataclass(frozen=True)
class Suspicion:
    """Replicas that differ. order: of the first operation, among those of all ranks: what others have received of a
    wrong rank differs later. ranks: one of which is wrong. judge: as of `Evidence`; None: nothing has told them apart.
    """

    order: tuple[int, int, int]
    where: str
    ranks: tuple[int, ...]
    judge: str | None
    pairs: tuple[dict[str, Any], ...]

    def wrong_bits(self, step: int) -> WrongBits:
        """To be reported."""
        details = {"pairs": list(self.pairs)}
        return WrongBits(evidence.SHADOW, step, self.where, self.ranks, judge=self.judge, details=details)


def of_replicas(pairs: Iterable[ReplicaPair], group: Sequence[int], stage: int) -> Suspicion | None:
    """Suspect replicas of this rank; None: they agree. group: their ranks. stage: of the pipeline."""
    unlike = [pair for pair in pairs if pair.first is not None]
    if not unlike:
        return None
    first = min(unlike, key=lambda pair: pair.depth)
    passes = [str(first.first).startswith(which) for which in (FORWARD, BACKWARD)]
    order = (0, stage) if passes[0] else (1, -stage) if passes[1] else (2, 0)
    places = [n for pair in unlike for n in (pair.own, pair.shadow)]
    most = max(map(places.count, places))
    chosen = {n for n in places if places.count(n) == most}  # of three replicas, one is in two pairs
    judge = "a third replica" if len(chosen) == 1 else None
    ranks = tuple(sorted(group[n] for n in (chosen if judge else set(places))))
    shown = tuple({"own": group[p.own], "shadow": group[p.shadow], "first": p.first} for p in unlike)
    return Suspicion((*order, first.depth), str(first.first), ranks, judge, shown)


def narrowed(
    suspicion: Suspicion | None, repeated: Iterable[ReplicaPair], group: Sequence[int], judge: str
) -> Suspicion | None:
    """Return the ranks that do not repeat their own bits, if any. judge: what has told one from the others."""
    unsteady = tuple(sorted(group[pair.own] for pair in repeated if pair.first is not None))
    if suspicion is None or not unsteady:
        return suspicion
    return replace(suspicion, ranks=unsteady, judge=judge if len(unsteady) == 1 else None)


def earliest(suspicion: Suspicion | None) -> Suspicion | None:
    """Return the first of all ranks' suspicions in the order of execution. A collective."""
    return first_of(gathered(suspicion))


def first_of(every: Iterable[Suspicion | None]) -> Suspicion | None:
    """Return the first in the order of execution; of several there, one of them that suspects the ranks of all."""
    suspicions = [suspicion for suspicion in every if suspicion is not None]
    first = [suspicion for suspicion in suspicions if suspicion.order == min(each.order for each in suspicions)]
    ranks = tuple(sorted({rank for suspicion in first for rank in suspicion.ranks}))
    return replace(first[0], ranks=ranks, judge=first[0].judge if ranks == first[0].ranks else None) if first else None
