"""The callback that takes digests of all gradients and weights, whatever the layout.

Once, before the first step, the ranks tell each other what they hold; parts with one place are replicas. Then a step
costs a kernel for the gradients, one for the weights, and one all-reduce of a few numbers for every part.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.bridge.training.callbacks import CallbackContext
from torch import Tensor

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.digest import LANES, WITH_MAGNITUDE, Lanes
from tp_invariant_recipes.ledger.digests import Parameter, digest_texts, in_order, start_lanes
from tp_invariant_recipes.numerics import grad_norm
from tp_invariant_recipes.training.gathering import Diverged, by_value, gathered
from tp_invariant_recipes.training.optimizer_step import AroundOptimizerStep
from tp_invariant_recipes.training.shards import GlobalSlice, Held, Shards, covers

NOTHING = -(2**63)  # what a rank without a part says of it: no more than any number


@dataclass(frozen=True)
class Recorded:
    """The digests of one step, as StepRecord has them."""

    gradients: dict[str, str]
    weights: dict[str, str]
    diverged: Diverged


class Digests(AroundOptimizerStep):
    """Takes the digests of every `every`th step. For every rank.

    parameters: what they are of, known once training has started.
    initial:    of the weights before the first step, parameter → digest; None: training begins at a later one.
    due:        whether the running step has them.
    listener:   called with the digests of a step, once the GPU has them: during the next step, since waiting for them
                would cost more than taking them. No checkpoint counts, and no training ends, before that.

    The weights' kernel is started as the next step begins, where the GPU mostly waits for the host, and read when the
    host next waits for the GPU, which is at the gradient norm.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.parameters: tuple[Parameter, ...] = ()
        self.initial: dict[str, str] | None = None
        self.due = False
        self.listener: Callable[[Recorded], None] = lambda recorded: None
        self._gradient_lanes: Tensor | None = None
        self._merging: _Merging | None = None

    def on_train_start(self, context: CallbackContext) -> None:
        """Learn who holds what. Raises RunError, on every rank alike."""
        self._shards = _shards(context.model)
        gradients = self._shards.gradients(context.optimizer)
        # With several optimizers each has a norm of its own, of which this would not be the largest.
        alone = len(getattr(context.optimizer, "chained_optimizers", [None])) == 1
        magnitude = alone and all(part.values.dtype in WITH_MAGNITUDE for part in gradients)
        self._gradients = _Sums("gradients", gradients, magnitude=magnitude)
        self._weights = _Sums("weights", self._shards.weights())
        self._memory = self._shards.memory()
        self._merge = _Merge(self._gradients, self._weights)
        dtypes = self._gradients.dtypes
        self.parameters = tuple(
            Parameter(name, self._weights.shapes[name], dtypes.get(name), self._weights.dtypes[name])
            for name in self._weights.names
        )
        if context.state.train_state.step == 0:
            self.initial = self._initial()

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Take the weights as the last step left them; find out whether digests are due again."""
        self._start_merge()
        self.due = (context.state.train_state.step + 1) % self.every == 0

    def on_train_step_end(self, context: CallbackContext) -> None:
        """A step that did not reach the optimizer has no digests."""
        self.due = self._gradient_lanes is not None

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """Have the step in the ledger before the manifest is written, which makes the checkpoint count."""
        self.finish()
        dist.barrier()

    def on_train_end(self, context: CallbackContext) -> None:
        """Report the last step's."""
        self.finish()

    def finish(self) -> None:
        """Report the last step's, with all other ranks."""
        self._start_merge()
        self._report()

    def close(self) -> None:
        """Report what there is, after a failure: without waiting for other ranks, which may be gone."""
        if self._merging and self._merging.done.query():
            self._report(alone=True)

    @contextmanager
    def around_optimizer_step(self) -> Iterator[None]:
        """Take the gradients' digests; tell the exact norm the largest gradient, which their kernel has found."""
        if self.due:
            if self._shards.memory() != self._memory:
                raise RunError("parameters or gradients have moved in memory since training began: ledger.digests=0")
            self._gradient_lanes = self._gradients.lanes()
        self._report()  # while the GPU is busy
        found = self.due and self._gradients.lanes.magnitude
        with grad_norm.largest_known(self._gradients.lanes.largest) if found else nullcontext():
            yield

    def _initial(self) -> dict[str, str]:
        lanes = self._weights.lanes()
        lanes = torch.cat([lanes.new_zeros(len(self._gradients.own), LANES), lanes])
        merged, done = self._merge(lanes)
        done.synchronize()
        return self._weights.texts(merged.numpy()[len(self._gradients.parts) :, :LANES])

    def _start_merge(self) -> None:
        """Start on the weights' digests, and on what all ranks have together, for the step that has ended."""
        if self._gradient_lanes is not None:
            lanes = torch.cat([self._gradient_lanes, self._weights.lanes()])
            self._gradient_lanes = None
            self._merging = _Merging(lanes, *self._merge(lanes))

    def _report(self, *, alone: bool = False) -> None:
        merging, self._merging = self._merging, None
        if merging is None:
            return
        merging.done.synchronize()
        parts = merging.merged.numpy().reshape(-1, 2, LANES)
        split = len(self._gradients.parts)
        gradients, weights = self._gradients.texts(parts[:split, 0]), self._weights.texts(parts[split:, 0])
        self.listener(Recorded(gradients, weights, self._diverged(parts, merging.lanes, alone)))

    def _diverged(self, parts: np.ndarray, lanes: Tensor, alone: bool) -> Diverged:
        """The parts of which replicas disagree, and which ranks hold what.

        parts: of every part, the largest lanes that a rank has, and the largest of their complements.
        lanes: this rank's. alone: do not ask the others.
        """
        unequal = np.flatnonzero((parts[:, 0] != ~parts[:, 1]).any(1)).tolist()
        if not unequal:
            return ()
        own = dict(zip(self._merge.own, lanes.tolist(), strict=True))
        everyone = [] if alone else gathered({n: own[n] for n in unequal if n in own})
        named = [(sums.kind, name) for sums in (self._gradients, self._weights) for name, _ in sums.parts]
        return tuple(
            (*named[n], by_value({rank: held[n] for rank, held in enumerate(everyone) if n in held})) for n in unequal
        )


class _Merging(NamedTuple):
    """Digests on their way to the host.

    lanes:  of this rank's parts, int64 [own parts, LANES]. merged: of all parts, on the host, once `done`.
    """

    lanes: Tensor
    merged: Tensor
    done: Any


class _Merge:
    """What all ranks have, from what each has: one all-reduce for gradients and weights together.

    own: the numbers of this rank's parts among all parts, gradients first.
    """

    def __init__(self, gradients: "_Sums", weights: "_Sums") -> None:
        self.own = [*gradients.own, *(n + len(gradients.parts) for n in weights.own)]
        parts = len(gradients.parts) + len(weights.parts)
        device = gradients.lanes.device
        # Of each part its row in this rank's list; of those it does not hold, the row after the list.
        row = torch.full((parts,), len(self.own), dtype=torch.int64)
        row[self.own] = torch.arange(len(self.own))
        self._row = row.to(device)
        self._nothing = torch.full((1, 2 * LANES), NOTHING, dtype=torch.int64, device=device)
        self._host = torch.empty((parts, 2 * LANES), dtype=torch.int64, pin_memory=device.type == "cuda")

    def __call__(self, lanes: Tensor) -> tuple[Tensor, Any]:
        """Of every part, the largest lanes of any rank and the largest of their complements, and when they are there.

        lanes:   int64 [own parts, LANES].
        returns: int64 [parts, 2 · LANES] on the host, overwritten by the next call, and an event. The lanes of replicas
                 that agree are the complements of the complements.
        """
        rows = torch.cat([torch.cat([lanes, ~lanes], 1), self._nothing])
        merged = rows.index_select(0, self._row)
        if dist.get_world_size() > 1:
            dist.all_reduce(merged, op=dist.ReduceOp.MAX)
        self._host.copy_(merged, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return self._host, done


class _Sums:
    """The digests of one kind of tensor: this rank's parts, all ranks' parts, and whose they are.

    parts: (name, place) of every part, on all ranks in one order; own: which of them this rank holds.
    Raises RunError, on every rank alike, if the parts of a tensor are not the whole of it.
    """

    def __init__(self, kind: str, held: Sequence[Held], *, magnitude: bool = False) -> None:
        self.kind = kind
        self.lanes = Lanes([part.piece for part in held], magnitude=magnitude)
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

    def texts(self, parts: np.ndarray) -> dict[str, str]:
        """Parameter → digest. parts: int64 [parts, LANES]."""
        sums = self._starts.copy()
        np.add.at(sums, self._parameter, parts.astype(np.uint64))
        return dict(zip(self.names, digest_texts(sums.astype(">u8").tobytes()), strict=True))


def _shards(model: Iterable[Any]) -> Shards:
    """Raises RunError on every rank if any rank cannot place its tensors."""
    shards, problem = None, None
    try:
        shards = Shards(model)
    except RunError as error:
        problem = str(error)
    problems = [text for text in gathered(problem) if text is not None]
    if problems:
        raise RunError(problems[0])
    assert shards is not None
    return shards


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
