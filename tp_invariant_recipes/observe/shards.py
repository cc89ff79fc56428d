# SPDX-License-Identifier: Apache-2.0
"""The parts of parameters that a rank holds: the place of each in the whole, its weight, its gradient.

The places are those of Megatron's distributed checkpoints (`sharded_state_dict`), so whatever can be saved and loaded
in another layout has them: gated and Mamba projections, experts, tied embeddings, pipeline stages. A parameter is seen
as a table: its last dimension is the columns, the others together are the rows.
"""

import bisect
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.launch import TablePlace, TensorPart
from tp_invariant_recipes.observe import fsdp
from tp_invariant_recipes.observe.fsdp import FlatSlice

_NONE = FlatSlice(torch.empty(0), 0)


@dataclass(frozen=True)
class _OwnerView:
    """A table within a tensor of this rank: element (i, j) is at `offset + i · stride + j` of the flat tensor."""

    name: str
    shape: tuple[int, ...]
    owner: Tensor
    offset: int
    stride: int
    place: TablePlace


class Shards:
    """The parameters and saved buffers of this rank's model chunks, and where they lie.

    Raises RunError listing every tensor that Megatron's description does not place.
    """

    def __init__(self, model: Iterable[Any]) -> None:
        self.parts: list[_OwnerView] = []
        problems: list[str] = []
        self._sharded: dict[Tensor, fsdp.ShardedParameter] = {}
        for chunk in model:
            if sharded := fsdp.sharded_parameters(chunk):
                self._sharded |= {parameter.owner: parameter for parameter in sharded}
                with fsdp.described(unwrapped(chunk)) as owners:
                    self._add(unwrapped(chunk), problems, owners)
            else:
                self._add(unwrapped(chunk), problems, {})
        self._owners = list({id(part.owner): part.owner for part in self.parts}.values())
        if problems:
            raise RunError(
                "digests cannot tell where these tensors lie in the whole model:\n  "
                + "\n  ".join(problems)
                + "\nrecord none: ledger.digests=0"
            )

    def weights(self) -> list[TensorPart]:
        """Return what this rank holds of the model's weights and saved buffers."""
        return self.held({owner: self._weight(owner) for owner in self._owners})

    def _weight(self, owner: Tensor) -> FlatSlice:
        sharded = self._sharded.get(owner)
        return sharded.weight if sharded else FlatSlice(owner.detach().view(-1), 0)

    def gradients(self, optimizer: Any) -> list[TensorPart]:
        """Return what this rank's optimizer sees of the gradients; a distributed one has its own part of them."""
        return self.held(self.stored_gradients(optimizer))

    def stored_gradients(self, optimizer: Any) -> dict[Tensor, FlatSlice]:
        """Parameter → the same."""
        if self._sharded:
            return {owner: found for owner, parameter in self._sharded.items() if (found := parameter.gradient)}
        owned = _owned(optimizer)
        gradients = {}
        for owner in self._owners:
            gradient = getattr(owner, "main_grad", None)
            if gradient is not None:
                start, end = (0, gradient.numel()) if owned is None else owned.get(owner, (0, 0))
                gradients[owner] = FlatSlice(gradient.detach().view(-1)[start:end], start)
        return gradients

    def held(self, stored: Mapping[Tensor, FlatSlice], *, copies: bool = False) -> list[TensorPart]:
        """Return the parts of these values. copies: beside the weights that follow from them."""
        held = []
        for part in self.parts:
            values, start = stored.get(part.owner, _NONE)
            for block in _within(part, start, start + values.numel()):
                held.append(_held(block, values, start, self._weight(part.owner) if copies else None))
        return held

    def partly(self, stored: Mapping[Tensor, FlatSlice]) -> set[str]:
        """Names of the parts that these values do not hold whole, if only because they hold nothing of them."""
        return {
            part.name
            for part in self.parts
            if (values := stored.get(part.owner)) is None or values.values.numel() != part.owner.numel()
        }

    def named(self, values: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
        """Name of a parameter → what there is of it as a whole."""
        return {part.name: values[part.owner] for part in self.parts if part.owner in values}

    def memory(self) -> tuple[int, ...]:
        """Where tensors and gradients are. What `weights` and `gradients` returned is good as long as this is so."""
        if self._sharded:
            return fsdp.memory(self._sharded.values())
        owners = self._owners
        gradients = [owner.main_grad.data_ptr() for owner in owners if hasattr(owner, "main_grad")]
        return (*(owner.data_ptr() for owner in owners), *gradients)

    def _add(self, module: Any, problems: list[str], owners: Mapping[int, Tensor]) -> None:
        """owners: id of a tensor that stands for one without memory → that one."""
        tensors = dict(module.named_parameters())
        names = {id(tensor): name for name, tensor in tensors.items()}
        names = {id(owners.get(number)) if number in owners else number: name for number, name in names.items()}
        tensors |= {name: b for name, b in module.named_buffers() if name not in tensors}
        memory = _Memory(tensors.values())
        placed: dict[int, int] = {}
        seen: set[tuple[str, TablePlace, int]] = set()
        for sharded in sharded_tensors(module.sharded_state_dict()):
            location = memory.find(sharded.data)
            if location is None:
                problems.append(f"{sharded.key}: not a view of any tensor of the model")
                continue
            owner, offset = location
            owner = owners.get(id(owner), owner)
            try:
                part = _part(sharded, owner, offset)
            except ValueError as error:
                problems.append(f"{sharded.key}: {error}")
                continue
            key = (part.name, part.place, id(owner))
            if key in seen:  # a tied weight is described twice
                continue
            seen.add(key)
            self.parts.append(part)
            placed[id(owner)] = placed.get(id(owner), 0) + part.place.rows * part.place.columns
        for number, name in names.items():
            if placed.get(number) != tensors[name].numel():
                problems.append(f"{name}: {placed.get(number, 0)} of {tensors[name].numel()} elements are placed")


class _Memory:
    """Finds the tensor that a view looks into."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = sorted((t for t in tensors if t.numel()), key=lambda t: t.data_ptr())
        self.starts = [t.data_ptr() for t in self.tensors]

    def find(self, view: Tensor) -> tuple[Tensor, int] | None:
        """Return the tensor, and how many of its elements lie before the view's first; None: no tensor holds it."""
        at = bisect.bisect_right(self.starts, view.data_ptr()) - 1
        if at < 0 or not view.numel():
            return None
        owner = self.tensors[at]
        offset, rest = divmod(view.data_ptr() - owner.data_ptr(), owner.element_size())
        inside = offset + view.numel() <= owner.numel() and not rest and view.dtype == owner.dtype
        return (owner, offset) if inside else None


def unwrapped(chunk: Any) -> Any:
    """Return the model itself, out of what DDP and mixed precision wrap around it."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def gather_weights(model: Iterable[Any], *, loaded: bool = False) -> None:
    """Have the optimizer's new weights on all ranks, where the next forward pass would gather them. A collective.

    loaded: whether they come from a checkpoint, after which FSDP always leaves that to the forward pass.
    """
    for chunk in model:
        overlapped = getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False)
        if sharded := fsdp.sharded_parameters(chunk):
            if overlapped or loaded:
                fsdp.gather_weights(chunk, sharded)
            continue
        if not overlapped:
            continue
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if not group.param_gather_dispatched or group.param_gather_handle is not None:
                with torch.no_grad():
                    group.start_param_sync(force_sync=True)


def sharded_tensors(state: Any) -> Iterator[Any]:
    """All of Megatron's ShardedTensors in what describes a model, those that factories make too."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, ShardedTensorFactory):
        yield from sharded_tensors(state.build())
    elif isinstance(state, dict | list | tuple):
        for part in state.values() if isinstance(state, dict) else state:
            yield from sharded_tensors(part)


def _part(sharded: Any, owner: Tensor, offset: int) -> _OwnerView:
    """ValueError: the view is not a table within the owner, or not one within the whole."""
    data, axes = sharded.data, sharded.prepend_axis_num
    shape, start = tuple(sharded.global_shape[axes:]), tuple(sharded.global_offset[axes:])
    if len(shape) != data.dim():
        raise ValueError(f"{data.dim()} dimensions here and {len(shape)} in the whole")
    if not owner.is_contiguous():
        raise ValueError("not contiguous in memory")
    if data.dim() < 2:
        data, start, table = data.reshape(1, -1), (0, *(start or (0,))), (1, *(shape or (1,)))
    else:
        table = shape
    if data.shape[1:-1] != table[1:-1]:
        raise ValueError(f"split in a dimension between the first and the last: {tuple(data.shape)} of {shape}")
    between = math.prod(table[1:-1])
    rows = data.shape[0] * between
    columns = data.shape[-1]
    stride = data.stride(-2) if data.dim() > 1 and data.shape[-2] > 1 else data.stride(0) // between
    if (columns > 1 and data.stride(-1) != 1) or not _regular(data, stride):
        raise ValueError(f"stride {data.stride()} does not fit a table")
    place = TablePlace(row=start[0] * between, step=1, rows=rows, column=start[-1], columns=columns)
    return _OwnerView(whole_name(sharded.key, sharded.global_offset[:axes]), shape, owner, offset, stride, place)


def _regular(data: Tensor, stride: int) -> bool:
    """Return whether all dimensions but the last step through memory as one dimension of this stride."""
    expected = stride
    for size, step in zip(reversed(data.shape[:-1]), reversed(data.stride()[:-1]), strict=True):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def whole_name(key: str, indices: tuple[int, ...]) -> str:
    """Return a checkpoint's key with the numbers that it leaves to prepended axes: of the layer, then of the expert.

    "decoder.layers.mlp.experts.experts.linear_fc1.weight", (3, 7) → "decoder.layers.3.mlp.experts.7.linear_fc1.weight"
    """
    numbers = list(indices)
    if numbers and re.search(r"\blayers\.(?!\d)", key):
        key = re.sub(r"\blayers\.", f"layers.{numbers.pop(0)}.", key, count=1)
    for number in numbers:
        if re.search(r"\bexperts\.experts\.", key):
            key = re.sub(r"\bexperts\.experts\.", f"experts.{number}.", key, count=1)
        else:
            key = f"{key}.{number}"
    return key


def _held(view: _OwnerView, values: Tensor, start: int, weight: FlatSlice | None) -> TensorPart:
    """Return the part of `values`, which are the flat owner's from `start` on. weight: of which it has a copy."""
    table = _table(values, view.offset - start, view.stride, view.place)
    copy = weight and _table(weight.values, view.offset - weight.start, view.stride, view.place)
    return TensorPart(table, view.place.row, view.place.column, view.place.step, copy, view.name, view.shape)


def _table(tensor: Tensor, offset: int, stride: int, place: TablePlace) -> Tensor:
    flat = tensor.detach()
    return torch.as_strided(flat, (place.rows, place.columns), (stride, 1), flat.storage_offset() + offset)


def _owned(optimizer: Any) -> dict[Tensor, tuple[int, int]] | None:
    """Parameter → (start, end) of its flat gradient that this rank's distributed optimizer has; None: it has all."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    distributed = [part for part in parts if isinstance(part, DistributedOptimizer)]
    if not distributed:
        return None
    owned = {}
    for part in distributed:
        for buffer in part.gbuf_ranges:
            for buckets in buffer.values():
                for bucket in buckets:
                    for parameter, ranges in bucket["param_map"].items():
                        owned[parameter] = (ranges["param"].start, ranges["param"].end)
    return owned


def _within(part: _OwnerView, start: int, end: int) -> Iterator[_OwnerView]:
    """Cut the part's elements at `start` … `end - 1` of the flat tensor: whole rows, and pieces around them."""
    first = max(0, (start - part.offset) // part.stride)
    last = min(part.place.rows - 1, (end - 1 - part.offset) // part.stride)
    cuts = {}  # row -> first column and columns of it that lie within
    for row in {first, last} if first <= last else ():
        begin = part.offset + row * part.stride
        low, high = max(start, begin), min(end, begin + part.place.columns)
        cuts[row] = (low - begin, high - low)
    whole = [row for row, cut in cuts.items() if cut == (0, part.place.columns)]
    top = first if first in whole else first + 1
    bottom = last if last in whole else last - 1
    if top <= bottom:
        yield _cut(part, top, bottom - top + 1, 0, part.place.columns)
    for row, (column, columns) in cuts.items():
        if row not in whole and columns > 0:
            yield _cut(part, row, 1, column, columns)


def _cut(part: _OwnerView, row: int, rows: int, column: int, columns: int) -> _OwnerView:
    place = TablePlace(part.place.row + row, 1, rows, part.place.column + column, columns)
    return _OwnerView(part.name, part.shape, part.owner, part.offset + row * part.stride + column, part.stride, place)
