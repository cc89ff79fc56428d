# SPDX-License-Identifier: Apache-2.0
"""The optimizer: some elements of a step of Adam computed again.

A step of numerics=portable is specified to the last bit (portable/ieee/adam.py), so the host computes a GPU's.
Otherwise the run's own optimizer computes the same elements again, in another launch on the device. They are blocks,
spread over a parameter. A library takes the last elements, which fill no vector, another way; the blocks keep away
from them.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.features.guard.judge import Judge, SilentDataCorruption
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.numerics.gemm.judge import UnlikeBits, difference
from tp_invariant_recipes.observe.optimizer_state import OptimizerState, Slot

BLOCKS = 16  # of a step
BLOCK = 64  # elements: a multiple of what any library takes at once
STATE = ("exp_avg", "exp_avg_sq")
DEFINED = "its definition, computed by the host's CPU"


@dataclass
class Update:
    """What a step makes of some elements of a parameter.

    wrapped: the optimizer of torch or Transformer Engine. group: of the parameter. updates: how often it was updated.
    inputs:  "p", "g" and the moments, without these in its first step. results: "p" and the moments.
    """

    wrapped: Any
    group: dict[str, Any]
    updates: float
    inputs: dict[str, Tensor]
    results: dict[str, Tensor] = field(default_factory=dict)

    def recompute(self) -> dict[str, Tensor]:
        """Compute the results again where the inputs are."""
        return repeated(self.wrapped, self.group, self.inputs, self.updates)

    def unlike(self, recomputed: dict[str, Tensor] | None = None) -> UnlikeBits | None:
        """How the results differ from others, on the host; None given: from those that the host computes."""
        self.inputs, self.results = _on_host(self.inputs), _on_host(self.results)
        computed = _on_host(self.recompute() if recomputed is None else recomputed)
        differences = (difference(self.results[name], computed[name]) for name in self.results)
        wrong = [unlike_bits for unlike_bits in differences if unlike_bits is not None]
        counts = (sum(getattr(unlike_bits, name) for unlike_bits in wrong) for name in ("outputs", "elements", "bits"))
        return UnlikeBits(*counts) if wrong else None


class Adam:
    """A range of one parameter in every step. names: of parameters, by tensor. portable: whether the step is
    specified."""

    def __init__(
        self, state: OptimizerState, names: dict[Tensor, str], judge: Judge, rank: int, portable: bool
    ) -> None:
        self.state, self.names, self.judge, self.rank, self.portable = state, names, judge, rank, portable
        self._chosen: tuple[Slot, slice, Update] | None = None

    def before(self, draw: random.Random) -> None:
        """Copy what the step begins with, if this rank's optimizer has anything."""
        if not self.state.slots:
            return
        slot = draw.choice(self.state.slots)
        size = slot.updated.numel()
        threads = torch.get_num_threads()  # each has a part of its own, with last elements of its own
        count = (size // threads if threads > 1 else size) // BLOCK
        step = max(1, count // BLOCKS)
        start = draw.randrange(max(1, count - step * (BLOCKS - 1)))
        part = slice(start, min(count, start + step * (BLOCKS - 1) + 1), step)
        group = {key: value for key, value in slot.group.items() if key != "params"}
        self._chosen = slot, part, Update(slot.wrapped, group, float(slot.step or 0), _values(slot, part))

    def after(self, step: int) -> None:
        """Compute the elements again and have them compared. A step that the optimizer has skipped is not."""
        chosen, self._chosen = self._chosen, None
        if chosen is None or (gradient := chosen[0].gradient) is None:
            return
        slot, part, update = chosen
        if float(slot.step or 0) == update.updates:
            return
        update.results = _values(slot, part)
        update.inputs["g"] = _flat(gradient, part)
        recomputed = None if self.portable else update.recompute()
        where = f"update of {self.names.get(slot.owner, 'a parameter')} by the optimizer"

        def case() -> SilentDataCorruption | None:
            unlike_bits = update.unlike(recomputed)
            if unlike_bits is None:
                return None
            judge = DEFINED if recomputed is None else "the same elements, updated again"
            numbers = {k: v for k, v in update.group.items() if isinstance(v, int | float | tuple)}
            tensors = {f"before.{k}": v for k, v in update.inputs.items()}
            tensors |= {f"after.{k}": v for k, v in update.results.items()}
            details = {"updates": update.updates, "group": numbers}
            return SilentDataCorruption(
                evidence.OPTIMIZER, step, where, (self.rank,), unlike_bits, judge, tensors, details, recomputed is None
            )

        self.judge.submit(case)


def repeated(wrapped: Any, group: dict[str, Any], inputs: dict[str, Tensor], updates: float) -> dict[str, Tensor]:
    """Update some elements as an optimizer does, by itself: "p" and the moments.

    wrapped: the optimizer, of which nothing changes. inputs: "p", "g" and the moments; without these, its first step.
    """
    optimizer = object.__new__(type(wrapped))
    vars(optimizer).update(vars(wrapped))
    parameter = torch.nn.Parameter(inputs["p"].clone())
    parameter.grad = inputs["g"].clone()
    state = {name: inputs[name].clone() for name in STATE if name in inputs}
    optimizer.state = defaultdict(dict)
    optimizer.param_groups = [{**group, "params": [parameter]}]
    if state:
        counted = torch.tensor(updates, dtype=torch.float32)
        optimizer.state[parameter] = state | ({} if "step" in group else {"step": counted})
    if "step" in group:
        step = group["step"]
        counted = torch.full_like(step, updates) if isinstance(step, Tensor) else type(step)(updates)
        optimizer.param_groups[0]["step"] = counted
    optimizer.step()
    return {"p": parameter.detach(), **{name: optimizer.state[parameter][name] for name in STATE}}


def _flat(tensor: Tensor, part: slice) -> Tensor:
    """Return the blocks, one after the other; of a tensor smaller than a block, all of it."""
    flat = tensor.detach().reshape(-1)
    whole = flat.numel() // BLOCK * BLOCK
    return flat.clone() if not whole else flat[:whole].view(-1, BLOCK)[part].reshape(-1).clone()


def _values(slot: Slot, part: slice) -> dict[str, Tensor]:
    state = slot.state
    return {"p": _flat(slot.updated, part)} | {name: _flat(state[name], part) for name in STATE if name in state}


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}
