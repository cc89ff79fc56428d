"""Digests of one kind of tensor: which parts the ranks hold, and the sums of the lanes of this rank's parts."""

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.digest import LANES, Lanes
from tp_invariant_recipes.kernels.tensor_part import TensorPart
from tp_invariant_recipes.ledger.digests import digest_texts, in_order, stack_digest, stacked_name, stacks, start_lanes
from tp_invariant_recipes.observe.digests.parts import EXTENT, coefficients, columns_of, extent, fits, is_whole
from tp_invariant_recipes.observe.union import holders, keys_of, keys_of_all, summed, union


class StartedSums(NamedTuple):
    """Lanes of one kind of tensor, which a kernel may still be at.

    lanes: of this rank's parts, int64 [own parts, LANES]. unlike: elements whose copy is unlike, int64 [own parts].
    """

    sums: "Sums"
    lanes: Tensor
    unlike: Tensor


class Sums:
    """The digests of one kind of tensor: this rank's parts, and what the ranks need to know of each other's.

    names:    of all tensors, on all ranks in one order. tensor: of each of this rank's parts, its tensor's number.
    places:   of this rank's parts. first: whether it is the first rank that holds them, bool [own parts].
    factors:  of its lanes in the sums that compare replicas, int64 [own parts, LANES] (parts.py).
    recorded: the tensors whose digests the ledger has, while replicas of all are compared; None: all of them.
    stacked:  whether tensors of experts have one digest together (`stacks`).
    Raises RunError, on every rank alike, if the parts of a tensor are not the whole of it.
    """

    def __init__(
        self,
        kind: str,
        held: Sequence[TensorPart],
        device: torch.device,
        *,
        magnitude: bool = False,
        recorded: set[str] | None = None,
        stacked: bool = False,
    ) -> None:
        self.kind, self.stacked = kind, stacked
        self._recorded, self._device, self._magnitude = recorded, device, magnitude
        self.look_at(held)
        self.shapes, self.dtypes, problems = _tensors(held, device)
        self.names = in_order(self.shapes)
        number = {name: n for n, name in enumerate(self.names)}
        self.tensor = [number[part.name] for part in held]
        self.places = [part.place for part in held]
        keys = keys_of([repr((part.name, *part.place)) for part in held])
        count, before = holders(keys_of_all(keys, device), keys, dist.get_rank())
        self.first, self.factors = before == 0, coefficients(keys, count, before)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        partial = [
            f"{name}: the ranks' parts do not cover its shape {self.shapes[name]} exactly"
            for name, extents in zip(self.names[rank::ranks], self._extents(device)[rank::ranks].tolist(), strict=True)
            if not is_whole(extents, math.prod(self.shapes[name]))
        ]
        problems += [text for _, text in union(partial, device)]
        if problems:
            raise RunError(
                f"digests of {kind} are not possible:\n  " + "\n  ".join(problems) + "\nrecord none: ledger.digests=0"
            )
        starts = [start_lanes(self.dtypes[name], self.shapes[name]) for name in self.names]
        self._starts = np.array(starts, dtype=np.uint64).reshape(-1, LANES)

    def _extents(self, device: torch.device) -> Tensor:
        """Sum what tells whether ranks have all of each tensor: [tensors, EXTENT]. A collective of the world."""
        sums = torch.zeros((len(self.names), EXTENT), dtype=torch.int64)
        for tensor, place, first in zip(self.tensor, self.places, self.first, strict=True):
            if first:
                sums[tensor] += torch.tensor(extent(place, columns_of(self.shapes[self.names[tensor]])))
        return summed(sums.to(device)).cpu()

    def look_at(self, held: Sequence[TensorPart]) -> None:
        """Take lanes of these parts from now on, which are the same elsewhere in memory."""
        self.lanes = Lanes(held, magnitude=self._magnitude, device=self._device)

    def started(self) -> StartedSums:
        """Start the kernel over what is in memory."""
        lanes = self.lanes()
        return StartedSums(self, lanes, self.lanes.unlike)

    def texts(self, lanes: np.ndarray) -> dict[str, str]:
        """Parameter → digest. lanes: int64 [tensors, LANES], of all ranks together."""
        sums = (self._starts + lanes.astype(np.uint64)).astype(">u8")
        single, stacks = self._stacks
        texts = dict(zip(single, digest_texts(sums[list(single.values())].tobytes()), strict=True))
        texts |= {name: stack_digest(sums[at].tobytes()) for name, at in stacks.items()}
        return {name: texts[name] for name in self._written}

    @functools.cached_property
    def _stacks(self) -> tuple[dict[str, int], dict[str, list[int]]]:
        """Name → number of the tensor, or the numbers of those of a stack."""
        indices = stacks(self.names) if self.stacked else {name: [n] for n, name in enumerate(self.names)}
        numbers = {name: at for name, at in indices.items() if name == self.names[at[0]]}
        return {name: at[0] for name, at in numbers.items()}, {n: at for n, at in indices.items() if n not in numbers}

    @functools.cached_property
    def _written(self) -> list[str]:
        names = self.names if self._recorded is None else [name for name in self.names if name in self._recorded]
        return list(dict.fromkeys(map(stacked_name, names))) if self.stacked else names


class MovingSums:
    """The digests of a kind of tensor that need not exist before the first step, or stay where it is.

    held: gives this rank's parts as they are now. addresses: where they are. sums: makes the digests of parts.
    """

    def __init__(
        self,
        held: Callable[[], list[TensorPart]],
        addresses: Callable[[], tuple[int, ...]],
        sums: Callable[[list[TensorPart]], Sums],
    ) -> None:
        self._held, self._addresses, self._make = held, addresses, sums
        self._known: tuple[int, ...] | None = None
        self._sums: Sums | None = None

    @property
    def known(self) -> bool:
        """Return whether all ranks have been asked for their parts."""
        return self._sums is not None

    def sums(self) -> Sums:
        """Return the digests. A collective of all ranks the first time."""
        addresses = self._addresses()
        if self._sums is None:
            self._sums = self._make(self._held())
        elif addresses != self._known:
            self._sums.look_at(self._held())
        self._known = addresses
        return self._sums


def _tensors(
    held: Sequence[TensorPart], device: torch.device
) -> tuple[dict[str, tuple[int, ...]], dict[str, str], list]:
    """Shapes and dtypes of all tensors by name, and what is wrong with them. A collective of the whole world."""
    seen = Counter((part.name, part.place) for part in held)
    wrong = [f"{name}: rank {dist.get_rank()} holds a part of it twice" for (name, _), n in seen.items() if n > 1]
    wrong += [
        f"{part.name}: rank {dist.get_rank()} holds a part that is not within its shape {part.shape}"
        for part in held
        if not fits(part.place, part.shape)
    ]
    described = [json.dumps([part.name, dtype_name(part.values), part.shape]) for part in held]
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    problems = []
    told = union([*described, *map(json.dumps, wrong)], device)
    everything = json.loads(f"[{','.join(text for _, text in told)}]")  # at once: a call for each would take longer
    for (rank, _), entry in zip(told, everything, strict=True):
        if isinstance(entry, str):
            problems.append(entry)
            continue
        name, dtype, shape = entry[0], entry[1], tuple(entry[2])
        if (shapes.setdefault(name, shape), dtypes.setdefault(name, dtype)) != (shape, dtype):
            problems.append(f"{name}: {dtype} {shape} on rank {rank}, elsewhere {dtypes[name]} {shapes[name]}")
    return shapes, dtypes, problems


def dtype_name(tensor: Tensor) -> str:
    """Such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")
