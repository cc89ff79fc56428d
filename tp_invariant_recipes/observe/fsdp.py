# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of a model that Megatron-FSDP shards: elements `start` … of each flat parameter.

FSDP keeps buckets of parameters in flat buffers, of which a rank has a shard or all, by the strategy:

    strategy             weights     gradients after reduction          masters and moments
    no_shard             all         all, summed                        all
    optim                all         all; the rank's shard is summed    shard
    optim_grads          all         shard                              shard
    optim_grads_params   shard       shard                              shard

A parameter is known by the tensor that layers compute with, whose memory comes and goes with the last strategy. The
optimizer has a DTensor instead, which also stands in the model between two steps.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class FlatSlice(NamedTuple):
    """Values for the elements `start` … of a flat parameter. values: flat, adjacent in memory."""

    values: Tensor
    start: int


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of a rank. owner: what layers compute with. updated: the optimizer's DTensor. start: of its shard."""

    owner: Tensor
    updated: Tensor
    start: int
    group: Any
    item: int

    @property
    def weight(self) -> FlatSlice:
        """Return what layers compute with, or the shard from which that is gathered."""
        buffer = self.group.model_weight_buffer
        if buffer is None:
            return FlatSlice(self.owner.detach().view(-1), 0)
        return FlatSlice(buffer.get_item(self.item), self.start if buffer.is_data_distributed else 0)

    @property
    def gradient(self) -> FlatSlice | None:
        """Return the reduced gradient; None: the parameter is frozen."""
        buffer, shard = self.group.main_grad_buffer, self.group.model_weight_buffer is not None
        return buffer and FlatSlice(buffer.get_item(self.item, only_shard=shard), self.start)


def sharded_parameters(chunk: Any) -> list[ShardedParameter]:
    """Return the parameters of a model chunk; empty: FSDP does not wrap it."""
    buffers = getattr(chunk, "param_and_grad_buffer", None)
    if buffers is None:
        return []
    dtensors = {id(dtensor.orig_param): dtensor for _, dtensor in buffers.optimizer_named_parameters}
    return [
        # With no_shard there is no slice, but all of the parameter.
        ShardedParameter(owner, dtensor, getattr(dtensor, "megatron_fsdp_slice", slice(0, None)).start, group, item)
        for group in buffers.parameter_groups
        for item, owner in enumerate(group.params)
        for dtensor in [dtensors[id(owner)]]
    ]


def local(tensor: Any) -> Any:
    """Return the part of a DTensor that this rank holds; any other value as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextmanager
def described(module: Any) -> Iterator[dict[int, Tensor]]:
    """Have tensors without memory in the place of a model's parameters, so that Megatron describes where these lie.

    yields: id of a parameter in the block → what layers compute with.
    """
    places = [(layer, name, p) for layer in module.modules() for name, p in layer._parameters.items() if p is not None]
    owners = {id(p): getattr(p, "orig_param", p) for _, _, p in places}
    tensors, owner_of, start = {}, {}, 0
    for number, owner in owners.items():
        # Each begins where the one before it would end if elements had 8 bytes, and so has an address of its own.
        at, size = start * 8 // owner.element_size(), math.prod(owner.shape)
        flat = torch.empty(at + size, dtype=owner.dtype, device="meta")[at:]
        tensors[number] = torch.nn.Parameter(flat.view(owner.shape), requires_grad=owner.requires_grad)
        tensors[number].__dict__.update(owner.__dict__)
        owner_of[id(tensors[number])] = owner
        start += size
    try:
        for layer, name, p in places:
            layer._parameters[name] = tensors[id(p)]
        yield owner_of
    finally:
        for layer, name, p in places:
            layer._parameters[name] = p


def gather_weights(chunk: Any, parameters: Iterable[ShardedParameter]) -> None:
    """Have the new weights on all ranks, where each keeps all of them."""
    buffers = [parameter.group.model_weight_buffer for parameter in parameters]
    if not any(buffer and buffer.is_data_distributed for buffer in buffers):
        chunk.start_param_sync(force_sync=True)


def memory(parameters: Iterable[ShardedParameter]) -> tuple[int, ...]:
    """Return where weights and gradients are."""
    slices = itertools.chain.from_iterable((p.weight, p.gradient) for p in parameters)
    return tuple(found.values.data_ptr() for found in slices if found)
