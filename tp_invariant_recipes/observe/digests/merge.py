# SPDX-License-Identifier: Apache-2.0
"""Digests of all ranks from the sums of each: one all-reduce for several kinds of tensor together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.kernels.digest import LANES
from tp_invariant_recipes.kernels.launch import TablePlace
from tp_invariant_recipes.ledger.schema import COPIES
from tp_invariant_recipes.observe.digests.sums import StartedSums, Sums
from tp_invariant_recipes.observe.union import Diverged, by_value, gathered, summed

CHECKS = LANES + 1  # of a tensor: the sums that compare replicas, and elements whose copy is unlike; mostly 0


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

    sums:   what they are of. tensor: of each of this rank's parts, its tensor's number among all of `sums`.
    lanes:  of this rank's parts, int64 [own parts, LANES]. unlike: likewise, elements whose copy is unlike.
    merged: of all tensors, on the host, once `done`: int64 [tensors · LANES + tensors · CHECKS].
    """

    sums: tuple[Sums, ...]
    tensor: list[int]
    lanes: Tensor
    unlike: Tensor
    merged: Tensor
    done: Any


class Merge:
    """What all ranks have, from what each has: one all-reduce for several kinds of tensor together.

    tensor: of each of this rank's parts, its tensor's number among all, in the order of `sums`.
    """

    def __init__(self, sums: Sequence[Sums], device: torch.device) -> None:
        self.sums = tuple(sums)
        self.tensor: list[int] = []
        tensors = 0
        for kind_sums in sums:
            self.tensor += [n + tensors for n in kind_sums.tensor]
            tensors += len(kind_sums.names)
        self._tensor = torch.tensor(self.tensor, dtype=torch.int64, device=device)
        first = np.concatenate([kind_sums.first for kind_sums in sums]).astype(np.int64)
        factors = [np.repeat(first[:, None], LANES, 1), np.concatenate([kind_sums.factors for kind_sums in sums])]
        self._factors = torch.from_numpy(np.concatenate(factors, 1)).to(device)
        self._sums = torch.empty(tensors * (LANES + CHECKS), dtype=torch.int64, device=device)
        self._host = torch.empty(len(self._sums), dtype=torch.int64, pin_memory=device.type == "cuda")

    def __call__(self, taken: Sequence[StartedSums]) -> Merging:
        """Begin to sum every tensor's lanes over all ranks. The next call overwrites what this one has merged.

        taken: of `sums`, in their order.
        """
        lanes = torch.cat([started.lanes for started in taken])
        unlike = torch.cat([started.unlike for started in taken])
        of_lanes, of_checks = split(self._sums.zero_())
        of_lanes.index_add_(0, self._tensor, lanes * self._factors[:, :LANES])
        of_checks.index_add_(0, self._tensor, torch.cat([lanes * self._factors[:, LANES:], unlike.view(-1, 1)], 1))
        summed(self._sums)
        self._host.copy_(self._sums, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Merging(self.sums, self.tensor, lanes, unlike, self._host, done)


def split(merged: Any) -> tuple[Any, Any]:
    """[tensors, LANES] and [tensors, CHECKS] of what is merged, or of its sums, as views."""
    lanes = len(merged) // (LANES + CHECKS) * LANES
    return merged[:lanes].reshape(-1, LANES), merged[lanes:].reshape(-1, CHECKS)


def read_digests(merging: Merging, *, texts: bool = True, alone: bool = False) -> Recorded:
    """Return the digests, once the GPU has them. texts: make them. alone: do not ask other ranks which disagree."""
    merging.done.synchronize()
    lanes, checks = split(merging.merged.numpy())
    recorded: dict[str, dict[str, str] | None] = {}
    at = 0
    for kind_sums in merging.sums if texts else ():
        recorded[kind_sums.kind] = kind_sums.texts(lanes[at : at + len(kind_sums.names)]) or None
        at += len(kind_sums.names)
    return Recorded(**recorded, diverged=_diverged(merging, checks, alone))


def _diverged(merging: Merging, checks: np.ndarray, alone: bool) -> Diverged:
    """Return the tensors whose ranks disagree, and the ranks. checks: [tensors, CHECKS]. alone: ask no other rank."""
    if not checks.any():
        return ()
    unequal, unlike = (checks[:, :LANES] != 0).any(axis=1), checks[:, LANES] > 0
    named = [(kind_sums.kind, name) for kind_sums in merging.sums for name in kind_sums.names]
    if alone:
        rank_groups = ((dist.get_rank(),),)
        return tuple((*named[n], rank_groups) for n in np.flatnonzero(unequal))
    places = [place for kind_sums in merging.sums for place in kind_sums.places]
    parts = zip(merging.tensor, places, merging.lanes.tolist(), merging.unlike.tolist(), strict=True)
    held, copies = _gathered_parts([part for part in parts if unequal[part[0]] or unlike[part[0]]], named)
    groups = [(named[n], by_value(held[n, place])) for n, place in sorted(held)]
    replicas = [(*name, ranks) for name, ranks in groups if len(ranks) > 1]
    return (*replicas, *((COPIES, name, (tuple(sorted(ranks)),)) for name, ranks in copies.items()))


def _gathered_parts(
    parts: list[tuple[int, TablePlace, list[int], int]], named: list[tuple[str, str]]
) -> tuple[dict[tuple[int, TablePlace], dict[int, list[int]]], dict[str, set[int]]]:
    """Return the lanes that each rank has of a part, and the ranks whose copy of a tensor is unlike its master."""
    held: dict[tuple[int, TablePlace], dict[int, list[int]]] = {}
    copies: dict[str, set[int]] = {}
    for rank, rows in enumerate(gathered(parts)):
        for n, place, lanes, count in rows:
            held.setdefault((n, place), {})[rank] = lanes
            if count:
                copies.setdefault(named[n][1], set()).add(rank)
    return held, copies
