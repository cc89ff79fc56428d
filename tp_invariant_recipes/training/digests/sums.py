"""Digests of one kind of tensor: which parts the ranks hold, and the sums of the lanes of this rank's parts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.digest import LANES, Lanes
from tp_invariant_recipes.ledger.digests import digest_texts, in_order, start_lanes
from tp_invariant_recipes.training.gathering import gathered
from tp_invariant_recipes.training.shards import GlobalSlice, Held, covers


class StartedSums(NamedTuple):
    """Lanes of one kind of tensor, which a kernel may still be at.

    lanes: of this rank's parts, int64 [own parts, LANES]. unlike: elements whose copy is unlike, int64 [own parts].
    """

    sums: "Sums"
    lanes: Tensor
    unlike: Tensor


class Sums:
    """The digests of one kind of tensor: this rank's parts, all ranks' parts, and whose they are.

    parts: (name, place) of every part, on all ranks in one order; own: which of them this rank holds.
    recorded: the tensors whose digests the ledger has, while replicas of all are compared; None: all of them.
    Raises RunError, on every rank alike, if the parts of a tensor are not the whole of it.
    """

    def __init__(
        self,
        kind: str,
        held: Sequence[Held],
        device: torch.device,
        *,
        magnitude: bool = False,
        recorded: set[str] | None = None,
    ) -> None:
        self.kind = kind
        self._recorded, self._device, self._magnitude = recorded, device, magnitude
        self.look_at(held)
        everyone = gathered([(part.name, part.place, part.shape, dtype_name(part.values)) for part in held])
        self.shapes = {name: shape for rank in everyone for name, _, shape, _ in rank}
        self.dtypes = {name: dtype for rank in everyone for name, _, _, dtype in rank}
        self.names = in_order(self.shapes)
        self.parts = sorted({(name, place) for rank in everyone for name, place, _, _ in rank})
        problems = _conflicts(everyone, self.shapes, self.dtypes)
        places: dict[str, list[GlobalSlice]] = {}
        for name, place in self.parts:
            places.setdefault(name, []).append(place)
        problems += [
            f"{name}: the ranks' parts do not cover its shape {shape} exactly"
            for name, shape in self.shapes.items()
            if not covers(places[name], shape)
        ]
        if problems:
            raise RunError(
                f"digests of {kind} are not possible:\n  " + "\n  ".join(problems) + "\nrecord none: ledger.digests=0"
            )
        index = {part: n for n, part in enumerate(self.parts)}
        self.own = [index[part.name, part.place] for part in held]
        order = {name: n for n, name in enumerate(self.names)}
        self._parameter = np.array([order[name] for name, _ in self.parts], dtype=np.int64)
        starts = [start_lanes(self.dtypes[name], self.shapes[name]) for name in self.names]
        self._starts = np.array(starts, dtype=np.uint64).reshape(-1, LANES)

    def look_at(self, held: Sequence[Held]) -> None:
        """Take lanes of these parts from now on, which are the same elsewhere in memory."""
        self.lanes = Lanes([part.piece for part in held], magnitude=self._magnitude, device=self._device)

    def started(self) -> StartedSums:
        """Start the kernel over what is in memory."""
        lanes = self.lanes()
        return StartedSums(self, lanes, self.lanes.unlike)

    def texts(self, parts: np.ndarray) -> dict[str, str]:
        """Parameter → digest. parts: int64 [parts, LANES]."""
        sums = self._starts.copy()
        np.add.at(sums, self._parameter, parts.astype(np.uint64))
        found = dict(zip(self.names, digest_texts(sums.astype(">u8").tobytes()), strict=True))
        return found if self._recorded is None else {n: text for n, text in found.items() if n in self._recorded}


class MovingSums:
    """The digests of a kind of tensor that need not exist before the first step, or stay where it is.

    held: gives this rank's parts as they are now. addresses: where they are. sums: makes the digests of parts.
    """

    def __init__(
        self,
        held: Callable[[], list[Held]],
        addresses: Callable[[], tuple[int, ...]],
        sums: Callable[[list[Held]], Sums],
    ) -> None:
        self._held, self._addresses, self._make = held, addresses, sums
        self._known: tuple[int, ...] | None = None
        self._sums: Sums | None = None

    @property
    def known(self) -> bool:
        """Whether all ranks have been asked for their parts."""
        return self._sums is not None

    def sums(self) -> Sums:
        """The digests. A collective of all ranks the first time."""
        addresses = self._addresses()
        if self._sums is None:
            self._sums = self._make(self._held())
        elif addresses != self._known:
            self._sums.look_at(self._held())
        self._known = addresses
        return self._sums


def _conflicts(everyone: list[list[tuple]], shapes: dict, dtypes: dict) -> list[str]:
    """Ranks that see one tensor differently, and a rank that holds a part twice."""
    problems = []
    for rank, held in enumerate(everyone):
        seen = set()
        for name, place, shape, dtype in held:
            if (shape, dtype) != (shapes[name], dtypes[name]):
                problems.append(f"{name}: {dtype} {shape} on rank {rank}, elsewhere {dtypes[name]} {shapes[name]}")
            if (name, place) in seen:
                problems.append(f"{name}: rank {rank} holds a part of it twice")
            seen.add((name, place))
    return problems


def dtype_name(tensor: Tensor) -> str:
    """Such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")
