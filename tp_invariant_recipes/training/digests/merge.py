"""Digests of all ranks from the sums of each: one all-reduce for several kinds of tensor together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.kernels.digest import LANES
from tp_invariant_recipes.ledger.schema import COPIES
from tp_invariant_recipes.training.digests.sums import Sums
from tp_invariant_recipes.training.gathering import Diverged, by_value, gathered

NOTHING = -(2**63)  # what a rank without a part says of it: no more than any number
WIDTH = 2 * LANES + 1  # of a part, for all ranks together: lanes, their complements, elements whose copy is unlike


@dataclass(frozen=True)
class Recorded:
    """The digests of one step, as StepRecord has them; None: not taken."""

    gradients: Mapping[str, str] | None = None
    clipped: Mapping[str, str] | None = None
    moments: Mapping[str, str] | None = None
    masters: Mapping[str, str] | None = None
    weights: Mapping[str, str] | None = None
    diverged: Diverged = ()


class Merging(NamedTuple):
    """Digests on their way to the host.

    sums:   what they are of. own: the numbers of this rank's parts among all parts.
    lanes:  of this rank's parts, int64 [own parts, LANES]. unlike: likewise, elements whose copy is unlike.
    merged: of all parts, on the host, once `done`.
    """

    sums: tuple[Sums, ...]
    own: list[int]
    lanes: Tensor
    unlike: Tensor
    merged: Tensor
    done: Any


class Merge:
    """What all ranks have, from what each has: one all-reduce for several kinds of tensor together.

    own: the numbers of this rank's parts among all parts, in the order of `sums`.
    """

    def __init__(self, sums: Sequence[Sums], device: torch.device) -> None:
        self.sums = tuple(sums)
        self.own: list[int] = []
        parts = 0
        for one in sums:
            self.own += [n + parts for n in one.own]
            parts += len(one.parts)
        # Of each part its row in this rank's list; of those it does not hold, the row after the list.
        row = torch.full((parts,), len(self.own), dtype=torch.int64)
        row[self.own] = torch.arange(len(self.own))
        self._row = row.to(device)
        self._nothing = torch.full((1, WIDTH), NOTHING, dtype=torch.int64, device=device)
        self._host = torch.empty((parts, WIDTH), dtype=torch.int64, pin_memory=device.type == "cuda")

    def __call__(self, lanes: Tensor, unlike: Tensor) -> tuple[Tensor, Any]:
        """Of every part, the largest lanes of any rank and the largest of their complements, and when they are there.

        lanes:   int64 [own parts, LANES]. unlike: int64 [own parts].
        returns: int64 [parts, WIDTH] on the host, overwritten by the next call, and an event. The lanes of replicas
                 that agree are the complements of the complements.
        """
        rows = torch.cat([torch.cat([lanes, ~lanes, unlike.view(-1, 1)], 1), self._nothing])
        merged = rows.index_select(0, self._row)
        if dist.get_world_size() > 1:
            dist.all_reduce(merged, op=dist.ReduceOp.MAX)
        self._host.copy_(merged, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return self._host, done


def read_digests(merging: Merging, *, alone: bool = False) -> Recorded:
    """The digests, once the GPU has them. alone: do not ask the other ranks which of them disagree."""
    merging.done.synchronize()
    merged = merging.merged.numpy()
    texts: dict[str, dict[str, str] | None] = {}
    at = 0
    for one in merging.sums:
        texts[one.kind] = one.texts(merged[at : at + len(one.parts), :LANES]) or None
        at += len(one.parts)
    return Recorded(**texts, diverged=_diverged(merging, merged, alone))


def _diverged(merging: Merging, merged: np.ndarray, alone: bool) -> Diverged:
    """The parts of which replicas disagree, or that do not follow from master weights, and which ranks hold what.

    merged: of every part what all ranks have, int64 [parts, WIDTH]. alone: do not ask the others.
    """
    parts = merged[:, : 2 * LANES].reshape(-1, 2, LANES)
    unequal = np.flatnonzero((parts[:, 0] != ~parts[:, 1]).any(1)).tolist()
    unlike = np.flatnonzero(merged[:, -1] > 0).tolist()
    if not unequal and not unlike:
        return ()
    lanes = dict(zip(merging.own, merging.lanes.tolist(), strict=True))
    counts = dict(zip(merging.own, merging.unlike.tolist(), strict=True))
    requested = {n: (lanes[n], counts[n]) for n in {*unequal, *unlike} if n in lanes}
    everyone = [] if alone else gathered(requested)
    named = [(one.kind, name) for one in merging.sums for name, _ in one.parts]
    replicas = [
        (*named[n], by_value({rank: held[n][0] for rank, held in enumerate(everyone) if n in held})) for n in unequal
    ]
    copies: dict[str, set[int]] = {}
    for n in unlike:
        copies.setdefault(named[n][1], set()).update(
            rank for rank, held in enumerate(everyone) if n in held and held[n][1]
        )
    return (*replicas, *((COPIES, name, (tuple(sorted(ranks)),)) for name, ranks in copies.items()))
