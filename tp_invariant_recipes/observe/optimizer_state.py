# SPDX-License-Identifier: Apache-2.0
"""What an optimizer keeps of each parameter: its master weight, the gradient that it reads, its moments.

Megatron's optimizers wrap one of torch's or Transformer Engine's. The wrapped one updates the master weights where
there are any, and the model's own weights where not; with a distributed optimizer it has only this rank's range.

    optimizer                 the wrapped one updates            range of the flat parameter
    FP32Optimizer             the weight                         all
    Float16Optimizer…         a fp32 copy; a fp32 weight itself  all
    DistributedOptimizer      a fp32 copy; a fp32 weight itself  this rank's of the gradient buffer
    the same with FSDP        a fp32 copy                        this rank's of the DTensor

A LayerWiseDistributedOptimizer is a chain of the second kind that has some of the parameters on each rank, whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.observe import fsdp
from tp_invariant_recipes.observe.fsdp import FlatSlice, local

STEP = "step"  # the state that counts a parameter's updates: one number for all its elements


@dataclass(frozen=True)
class Slot:
    """What a rank's optimizer has of one parameter: elements `start` … of the flat parameter.

    owner:   the model's parameter.
    updated: flat or shaped as the owner: what the wrapped optimizer updates.
    master:  whether that is a copy in higher precision.
    wrapped: the optimizer of torch or Transformer Engine. group: its group of parameters that has `updated`.
    """

    owner: Tensor
    updated: Tensor
    start: int
    master: bool
    wrapped: Any
    group: dict[str, Any]

    @property
    def gradient(self) -> Tensor | None:
        """Return what the last step read; None: there was no step, or it has been dropped."""
        decoupled = getattr(self.updated, "decoupled_grad", None)  # of a precision-aware optimizer
        return local(self.updated.grad if decoupled is None else decoupled)

    @property
    def state(self) -> dict[str, Tensor]:
        """Name → tensor as large as `updated`. RunError: a tensor of another size."""
        state = self.wrapped.state.get(self.updated, {})
        tensors = {name: local(value) for name, value in state.items() if isinstance(value, Tensor) and name != STEP}
        for name, value in tensors.items():
            if value.numel() != local(self.updated).numel() or not value.is_contiguous():
                raise RunError(
                    f"digests cannot tell where {name} of the optimizer lies, {list(value.shape)} for a parameter of "
                    f"{self.updated.numel()} elements; record none: ledger.digests=0"
                )
        return tensors

    @property
    def step(self) -> Tensor | int | None:
        """How often it was updated; None: the optimizer does not count, or has no element of it."""
        if not local(self.updated).numel():
            return None
        return self.wrapped.state.get(self.updated, {}).get(STEP, self.group.get(STEP))

    def stored(self, values: Tensor) -> FlatSlice:
        """Values of this slot's elements, in their place."""
        return FlatSlice(local(values.detach()).view(-1), self.start)


class OptimizerState:
    """The slots of this rank."""

    def __init__(self, optimizer: Any) -> None:
        self.slots = [slot for part in _parts(optimizer) for slot in _slots(part)]
        self._counts: Tensor | None = None

    def masters(self) -> dict[Tensor, FlatSlice]:
        """Parameter → its master weights here, without those that have none."""
        return {slot.owner: slot.stored(slot.updated) for slot in self.slots if slot.master}

    def gradients(self, otherwise: dict[Tensor, FlatSlice]) -> dict[Tensor, FlatSlice]:
        """Parameter → the gradient that the step read; of those that a layer-wise optimizer does not: otherwise."""
        gradients = {slot.owner: otherwise[slot.owner] for slot in self.slots if slot.owner in otherwise}
        return gradients | {slot.owner: slot.stored(slot.gradient) for slot in self.slots if slot.gradient is not None}

    def moments(self) -> dict[str, dict[Tensor, FlatSlice]]:
        """Name of the state → parameter → values."""
        moments: dict[str, dict[Tensor, FlatSlice]] = {}
        for slot in self.slots:
            for name, value in slot.state.items():
                moments.setdefault(name, {})[slot.owner] = slot.stored(value)
        return moments

    def count(self) -> None:
        """Note how often every parameter was updated, for `counts`."""
        counted = [slot for slot in self.slots if slot.step is not None]
        if counted:
            numbers = [torch.as_tensor(slot.step).detach().to(torch.float64).view(1, 1) for slot in counted]
            counts = torch.cat([number.to(numbers[0].device) for number in numbers])
            if self._counts is None or len(self._counts) != len(counted):
                self._counts = torch.empty_like(counts, device=counted[0].owner.device)
            self._counts.copy_(counts)

    def counts(self) -> dict[Tensor, Tensor]:
        """Parameter → how often it was updated, fp64 [1, 1]: views of one tensor."""
        counted = [slot.owner for slot in self.slots if slot.step is not None]
        if self._counts is None:
            return {}
        return {owner: self._counts[n].view(1, 1) for n, owner in enumerate(counted)}

    def addresses_of_gradients(self) -> tuple[int, ...]:
        """Where the step has read gradients; 0: it has read none."""
        gradients = (slot.gradient for slot in self.slots)
        return tuple(0 if gradient is None else gradient.data_ptr() for gradient in gradients)

    def addresses_of_moments(self) -> tuple[int, ...]:
        """Where moments and counts are."""
        counts = () if self._counts is None else (self._counts.data_ptr(),)
        return (*counts, *(value.data_ptr() for slot in self.slots for value in slot.state.values()))

    def memory(self) -> tuple[int, ...]:
        """Where the updated tensors are."""
        return tuple(local(slot.updated).data_ptr() for slot in self.slots)


def _parts(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers of a chain, which may hold chains; without those that have no parameters here."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        for optimizer_part in chained:
            yield from _parts(optimizer_part)
    elif not getattr(optimizer, "is_stub_optimizer", False):
        yield optimizer


def _slots(part: Any) -> Iterator[Slot]:
    wrapped = part.optimizer
    groups = {id(parameter): group for group in wrapped.param_groups for parameter in group["params"]}
    for owner, updated, start, master in _updated(part):
        yield Slot(owner, updated, start, master, wrapped, groups[id(updated)])


def _updated(part: Any) -> Iterator[tuple[Tensor, Tensor, int, bool]]:
    """Yield an optimizer's (parameter, what is updated, first element, whether that is a master weight)."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if isinstance(part, DistributedOptimizer) and part.ddp_config.use_megatron_fsdp:
        yield from _of_fsdp(part)
    elif isinstance(part, DistributedOptimizer):
        yield from _of_distributed(part)
    elif hasattr(part, "fp32_from_float16_groups"):
        for owners, copies in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from ((owner, copy, 0, True) for owner, copy in zip(owners, copies, strict=True))
        yield from ((owner, owner, 0, False) for owners in part.fp32_from_fp32_groups for owner in owners)
    else:
        yield from ((owner, owner, 0, False) for group in part.optimizer.param_groups for owner in group["params"])


def _of_fsdp(part: Any) -> Iterator[tuple[Tensor, Tensor, int, bool]]:
    """With FSDP each element has a copy, which is a master weight where it is in higher precision."""
    parameters = {id(p.updated): p for chunk in part.model_chunks for p in fsdp.sharded_parameters(chunk)}
    for group in part.optimizer.param_groups:
        for updated in group["params"]:
            owner, start = parameters[id(updated)].owner, parameters[id(updated)].start
            yield owner, updated, start, updated.dtype != owner.dtype


def _of_distributed(part: Any) -> Iterator[tuple[Tensor, Tensor, int, bool]]:
    def start(owner: Tensor) -> int:
        return part._get_model_param_range_map(owner)["param"].start

    groups = (part.model_float16_groups, part.shard_fp32_from_float16_groups, part.shard_float16_groups)
    for owners, copies, shards in zip(*groups, strict=True):
        for owner, copy, shard in zip(owners, copies, shards, strict=True):
            # A precision-aware optimizer keeps the master weight in its state.
            yield owner, shard if copy is None else copy, start(owner), copy is not None
    for owners, shards in zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True):
        yield from ((owner, shard, start(owner), False) for owner, shard in zip(owners, shards, strict=True))
