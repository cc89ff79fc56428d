# SPDX-License-Identifier: Apache-2.0
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
from tp_invariant_recipes.kernels.launch import TablePlace, TensorPart
from tp_invariant_recipes.ledger.digests import digest_texts, in_order, stack_digest, stacked_name, stacks, start_lanes
from tp_invariant_recipes.observe.union import holders, keys_of, keys_of_all, summed, union

_PRIME = 2**61 - 1
# Two polynomials of degree below n that differ are equal at both with a probability of (n / 2^61)^2 (Schwartz, Zippel).
_POINTS = (0x1B873593CC9E2D51 % _PRIME, 0x0F4A7C159E3779B9 % _PRIME)
_LOW = 31  # bits; both halves of a number below 2^61 can be added 2^31 times
EXTENT = 2 * len(_POINTS)


@functools.lru_cache(maxsize=1 << 14)  # ranks have many parts of one form
def extent(place: TablePlace, columns: int) -> tuple[int, ...]:
    """EXTENT numbers that add up over parts. columns: of the whole tensor, seen as a table."""
    numbers: list[int] = []
    for x in _POINTS:
        start = pow(x, place.row * columns + place.column, _PRIME)
        rows = _geometric(pow(x, place.step * columns, _PRIME), place.rows)
        value = start * rows % _PRIME * _geometric(x, place.columns) % _PRIME
        numbers += [value & ((1 << _LOW) - 1), value >> _LOW]
    return tuple(numbers)


def is_whole(extents: Sequence[int], elements: int) -> bool:
    """Return whether parts whose extents have this sum hold each of so many elements exactly once."""
    sums = [extents[n] + (extents[n + 1] << _LOW) for n in range(0, EXTENT, 2)]
    return all(total % _PRIME == _geometric(x, elements) for total, x in zip(sums, _POINTS, strict=True))


def covers(places: Sequence[TablePlace], shape: Sequence[int]) -> bool:
    """Return whether places hold every element of a tensor exactly once. Its table ends with their last column."""
    columns = max((place.column + place.columns for place in places), default=1)
    extents = [extent(place, columns) for place in places] or [(0,) * EXTENT]
    return is_whole([sum(numbers) for numbers in zip(*extents, strict=True)], math.prod(shape))


def fits(place: TablePlace, shape: Sequence[int]) -> bool:
    """Return whether a place lies within a tensor of this shape."""
    rows, columns = math.prod(shape[:-1]), columns_of(shape)
    if min(place) < 0:
        return False
    return (
        not place.rows
        or not place.columns
        or (place.row + place.step * (place.rows - 1) < rows and place.column + place.columns <= columns)
    )


def columns_of(shape: Sequence[int]) -> int:
    """Of a tensor seen as a table."""
    return shape[-1] if shape else 1


def coefficients(keys: np.ndarray, count: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return the factors of this rank's lanes in the sums that compare replicas: int64 [parts, LANES].

    keys, count, before: of its parts, as `union.holders` has them. Of every part the factors of all holders add up to
    0 modulo 2^64. Each holder has an odd one in at least one lane: if it alone differs there, the sum is not 0.
    """
    values = np.zeros((len(keys), LANES), dtype=np.uint64)
    for n in np.flatnonzero(count > 1):
        numbers = before[n : n + 1] if before[n] else np.arange(1, count[n])  # the first's: what the others' lack to 0
        factors = _factors(int(keys[n]), numbers.astype(np.uint64), odd=bool(count[n] % 2))
        values[n] = factors[0] if before[n] else np.uint64(0) - factors.sum(0, dtype=np.uint64)
    return values.view(np.int64)


def _factors(key: int, numbers: np.ndarray, *, odd: bool) -> np.ndarray:
    """Of the holders with these numbers, from 1 on: uint64 [numbers, LANES]. odd: the number of holders is."""
    lanes = np.arange(1, LANES + 1, dtype=np.uint64)
    mixed = numbers[:, None] * np.uint64(0x9E3779B97F4A7C15) + lanes * np.uint64(0xD1B54A32D192ED03)
    mixed ^= np.uint64(key & (2**64 - 1))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # SplitMix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed |= np.uint64(1)
    if odd:  # then the first holder's would be even in both lanes: make another's even, in the last
        mixed[numbers == 1, -1] ^= np.uint64(1)
    return mixed


@functools.lru_cache(maxsize=1 << 14)
def _geometric(x: int, count: int) -> int:
    """1 + x + … + x^(count - 1) modulo the prime."""
    if x == 1:
        return count % _PRIME
    return (pow(x, count, _PRIME) - 1) * pow(x - 1, -1, _PRIME) % _PRIME


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
    factors:  of its lanes in the sums that compare replicas, int64 [own parts, LANES].
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
    wrong = [f"{name}: rank {dist.get_rank()} holds a shard of it twice" for (name, _), n in seen.items() if n > 1]
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
