"""The optimizer: some elements of a step of Adam computed again, and its memory between two steps.

A step of numerics=portable is stated to the last bit (portable/ieee_adam.py), so the host computes a GPU's. Otherwise
the run's own optimizer computes the same elements again, in another launch on the device. They are blocks, spread over
a parameter. A library takes the last elements, which fill no vector, another way; the blocks keep away from them.

Between two steps nobody writes weights and state: their digests after a step and before the next are equal.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tp_invariant_recipes.kernels.digest import Lanes
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.numerics.products.judge import UnlikeBits, difference
from tp_invariant_recipes.training.guard.fault import WrongBits
from tp_invariant_recipes.training.guard.judge import Judge
from tp_invariant_recipes.training.guard.weights import TURNS, tables
from tp_invariant_recipes.training.optimizer_state import OptimizerState, Slot

BLOCKS = 16  # of a step
BLOCK = 64  # elements: a multiple of what any library takes at once
STATE = ("exp_avg", "exp_avg_sq")


class _Before(NamedTuple):
    """What a step began with: the slot, its blocks, copies of them, and how often it was updated."""

    slot: Slot
    part: slice
    values: dict[str, Tensor]
    updates: float


class Adam:
    """A range of one parameter in every step. names: of parameters, by tensor. portable: whether the step is stated."""

    def __init__(
        self, state: OptimizerState, names: dict[Tensor, str], judge: Judge, rank: int, portable: bool
    ) -> None:
        self.state, self.names, self.judge, self.rank, self.portable = state, names, judge, rank, portable

    def before(self, draw: random.Random) -> _Before | None:
        """Copy what the step begins with. None: this rank's optimizer has nothing."""
        if not self.state.slots:
            return None
        slot = draw.choice(self.state.slots)
        part = _blocks(slot.updated.numel(), draw)
        values = {"p": _flat(slot.updated, part)}
        values |= {name: _flat(slot.state[name], part) for name in STATE if name in slot.state}
        return _Before(slot, part, values, float(slot.step or 0))

    def after(self, before: _Before, step: int) -> None:
        """Compute the elements again and have them compared. A step that the optimizer has skipped is not."""
        slot, part = before.slot, before.part
        gradient = slot.gradient
        if gradient is None or float(slot.step or 0) == before.updates:
            return
        results = {"p": _flat(slot.updated, part)} | {name: _flat(slot.state[name], part) for name in STATE}
        inputs = before.values | {"g": _flat(gradient, part)}
        group = {key: value for key, value in slot.group.items() if key != "params"}
        again = None if self.portable else repeated(slot.wrapped, group, inputs, before.updates)
        where = f"update of {self.names.get(slot.owner, 'a parameter')} by the optimizer"
        self.judge.submit(
            lambda: self._judged(slot.wrapped, group, inputs, before.updates, results, again, where, step)
        )

    def _judged(
        self,
        wrapped: Any,
        group: dict[str, Any],
        inputs: dict[str, Tensor],
        updates: float,
        results: dict[str, Tensor],
        again: dict[str, Tensor] | None,
        where: str,
        step: int,
    ) -> WrongBits | None:
        inputs, results = _on_host(inputs), _on_host(results)
        computed = _on_host(repeated(wrapped, group, inputs, updates) if again is None else again)
        found = _sum(difference(results[name], computed[name]) for name in results)
        if found is None:
            return None
        judge = "its definition, computed by the host's CPU" if again is None else "the same elements, updated again"
        numbers = {key: value for key, value in group.items() if isinstance(value, int | float | tuple)}
        tensors = {f"before.{k}": v for k, v in inputs.items()} | {f"after.{k}": v for k, v in results.items()}
        details = {"updates": updates, "group": {k: list(v) if isinstance(v, tuple) else v for k, v in numbers.items()}}
        return WrongBits(evidence.OPTIMIZER, step, where, (self.rank,), found, judge, tensors, details, again is None)


def repeated(wrapped: Any, group: dict[str, Any], inputs: dict[str, Tensor], updates: float) -> dict[str, Tensor]:
    """What an optimizer makes of some elements, by itself: "p" and the moments.

    wrapped: the optimizer, of which nothing changes. inputs: "p", "g" and the moments; without these, its first step.
    """
    again = object.__new__(type(wrapped))
    vars(again).update(vars(wrapped))
    parameter = torch.nn.Parameter(inputs["p"].clone())
    parameter.grad = inputs["g"].clone()
    state = {name: inputs[name].clone() for name in STATE if name in inputs}
    again.state = defaultdict(dict)
    again.param_groups = [{**group, "params": [parameter]}]
    if state:
        counted = torch.tensor(updates, dtype=torch.float32)
        again.state[parameter] = state | ({} if "step" in group else {"step": counted})
    if "step" in group:
        again.param_groups[0]["step"] = _like(group["step"], updates)
    again.step()
    return {"p": parameter.detach(), **{name: again.state[parameter][name] for name in STATE}}


class Memory:
    """Digests of a part of the weights and of the optimizer's state after a step, and before the next."""

    def __init__(self, state: OptimizerState, names: dict[Tensor, str], judge: Judge, rank: int) -> None:
        self.state, self.names, self.judge, self.rank = state, names, judge, rank
        self._left: tuple[int, list[str], Lanes, Tensor] | None = None
        self._lanes: dict[int, tuple[tuple[int, ...], list[str], Lanes]] = {}

    def leave(self, step: int, *, weights: bool) -> None:
        """Take the digests after a step. weights: also of the model's, which are not still on their way."""
        turn = step % TURNS
        named = [
            (f"{kind} of {self.names.get(slot.owner, 'a parameter')}", values)
            for slot in self.state.slots[turn::TURNS]
            for kind, values in (("master weights", slot.updated), *slot.state.items(), ("weights", slot.owner))
            if kind != "weights" or (weights and slot.master)
        ]
        if not named:
            return
        where = tuple(values.data_ptr() for _, values in named)
        if self._lanes.get(turn, ((), [], None))[0] != where:
            pieces = [(name, piece) for name, values in named for piece in tables(values)]
            self._lanes[turn] = where, [name for name, _ in pieces], Lanes([piece for _, piece in pieces])
        _, names, lanes = self._lanes[turn]
        self._left = step, names, lanes, lanes()

    def look(self) -> None:
        """Take them again before the next step, and have them compared."""
        if self._left is None:
            return
        (step, names, lanes, then), self._left = self._left, None
        now = lanes()
        unequal = (now != then).any(1)

        def case() -> WrongBits | None:
            wrong = [name for name, one in zip(names, unequal.tolist(), strict=True) if one]
            if not wrong:
                return None
            where = f"{', '.join(wrong[:4])} changed in memory after the step"
            return WrongBits(evidence.MEMORY, step, where, (self.rank,), details={"tensors": wrong})

        self.judge.submit(case)


def _blocks(size: int, draw: random.Random) -> slice:
    """Which blocks of a flat tensor, evenly spread from a drawn start."""
    threads = torch.get_num_threads()  # each has a part of its own, with last elements of its own
    count = (size // threads if threads > 1 else size) // BLOCK
    step = max(1, count // BLOCKS)
    start = draw.randrange(max(1, count - step * (BLOCKS - 1)))
    return slice(start, min(count, start + step * (BLOCKS - 1) + 1), step)


def _flat(tensor: Tensor, part: slice) -> Tensor:
    """The blocks, one after the other; of a tensor smaller than a block, all of it."""
    flat = tensor.detach().reshape(-1)
    whole = flat.numel() // BLOCK * BLOCK
    return flat.clone() if not whole else flat[:whole].view(-1, BLOCK)[part].reshape(-1).clone()


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.detach().cpu() for name, one in tensors.items()}


def _like(step: Any, updates: float) -> Any:
    return torch.full_like(step, updates) if isinstance(step, Tensor) else type(step)(updates)


def _sum(found: Sequence[UnlikeBits | None] | Any) -> UnlikeBits | None:
    wrong = [one for one in found if one is not None]
    if not wrong:
        return None
    return UnlikeBits(*(sum(getattr(one, name) for one in wrong) for name in ("outputs", "of", "bits")))
