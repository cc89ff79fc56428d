# SPDX-License-Identifier: Apache-2.0
"""Megatron-FSDP with the sums of DistributedDataParallel (numerics/megatron/data_parallel.py), bit for bit.

Gathers of parameters are exact. The gradient is the same tree over D data shards; the sharding strategy decides who
adds what:

    optim         a rank keeps whole gradients, and has consecutive shards. It adds these, then one reduce-scatter a
                  step sends a sum of each rank to the owner, as with DistributedDataParallel
    optim_grads,  a rank keeps its slice of the gradients, and a backward pass is a data shard. The passes of the
    optim_grads_  ranks that run side by side are neighbours in the tree, so ranks take the sequences in turn. Each
    params        pass ends with a reduce-scatter, and the owner adds up passes as a binary counter counts

    D = 8, dp = 2   rank 0 has the sequences 0, 2, 4, 6, rank 1 has 1, 3, 5, 7
                    an owner adds 0+1 | 2+3 | 4+5 | 6+7, and keeps (0+1)+(2+3) of its slice beside 4+5

An owner keeps log2(D/dp) slices, never a whole gradient. A pass has memory for the gradients of one unit (a layer),
and where an owner of experts gets the tokens of several data-parallel ranks, for one gradient of each.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.numerics.layers import embedding
from tp_invariant_recipes.numerics.layers.formats import fp8
from tp_invariant_recipes.numerics.megatron import data_parallel
from tp_invariant_recipes.numerics.sums import bucket_reduction, data_shards, weight_gradient
from tp_invariant_recipes.numerics.sums.data_shards import ShardCounter
from tp_invariant_recipes.numerics.sums.expert_groups import ExpertGroups
from tp_invariant_recipes.numerics.sums.weight_gradient import CONTEXTS, LEAF


class GradientGroup:
    """The gradients that Megatron-FSDP reduces at once, of a unit's experts or other parameters.

    parameters: Megatron's ParameterGroup, with a gradient buffer.
    counter:    what adds up passes or data shards.
    passes:     whether each backward pass is reduced, as a data shard; else a rank's sum, once a step.
    buffers:    data shards that a backward pass adds to, each with a gradient of its own; a power of two.
    copies:     consecutive ranks with the same tokens, of which one has the gradient and the others zeros.
    """

    def __init__(self, parameters: Any, counter: ShardCounter, passes: bool, buffers: int, copies: int) -> None:
        self.buffer, self.params = parameters.main_grad_buffer, parameters.params
        self.counter, self.passes, self.copies = counter, passes, copies
        # Megatron has memory for a pass where several ranks share the sums, and this the rest.
        self._count = buffers - (not passes or self.buffer.is_data_distributed)
        self.buffer.gradient_scaling_factor = 1.0  # the loss was divided by all ranks' sequences
        self._more: list[Tensor] = []  # gradients of the other data shards, laid out as Megatron's
        self._lookups: dict[str, Tensor] = {}  # of a tied weight: this rank's slice, apart from the output layer's
        for weight in self.params:
            setattr(weight, LEAF, not passes and counter.pairs)
            if passes:
                weight.get_main_grad = partial(self._begin, weight, weight.get_main_grad)
            else:
                setattr(weight, CONTEXTS, self._views(weight))

    def _views(self, weight: Any) -> list[Tensor]:
        start, stop = self._range(weight)
        return [data[start:stop].view(weight.shape) for data in self._zeros()]

    def _range(self, weight: Any) -> tuple[int, int]:
        item = self.buffer.item_index_map[self.buffer.param_idx[weight]]
        return item.global_data_index, item.global_data_index + item.size

    def _zeros(self) -> list[Tensor]:
        if not self._more:
            self._more = [self.buffer.data.new_zeros(self.buffer.bucket_index.size) for _ in range(self._count)]
        return self._more

    def _begin(self, weight: Any, fetch: Callable[[], Tensor]) -> Tensor:
        """Return zeros for a weight's gradient of one pass."""
        views = self._views(weight)
        first = fetch().zero_() if self.buffer.is_data_distributed else views.pop(0)
        setattr(weight, CONTEXTS, views)
        return first

    def sums(self) -> list[Tensor]:
        """Return what the counter adds up."""
        if self.passes:
            return [self.buffer.data, *self._lookups.values()]
        lookups = (kept for weight in self.params for kept in embedding.sums_of_their_own(weight))
        return [self.buffer.data, *self._more, *lookups]

    @torch.no_grad()
    def reduce(self) -> None:
        """Send each rank its slice of all ranks' gradients: of each pass, which it adds there, or once a step."""
        partials = self._zeros()
        if not self.passes or self.buffer.is_data_distributed:
            partials = [self.buffer.fetch_bucket().data, *partials]
        if not self.passes:
            for sums in self.sums():
                self.counter.finish(sums)
        mine = self._slice(partials)
        if self.passes:
            self.buffer.data.add_(mine)
            self._more = []
        for weight in self.params:
            for name in (embedding.AHEAD, embedding.LOOKUPS):
                if (kept := getattr(weight, name, None)) is not None:
                    self._add_lookups(weight, name, kept)

    def _slice(self, partials: list[Tensor]) -> Tensor:
        """Return this rank's slice of the sum, where the first partial has it."""
        data_parallel.add_neighbours(partials)
        group = self.buffer.data_parallel_group
        bucket_reduction.reduce_scatter(partials[:1], group, copies=self.copies)
        return partials[0].chunk(group.size())[group.rank()]

    def _add_lookups(self, weight: Any, name: str, kept: Tensor) -> None:
        laid_out = kept.new_zeros(self.buffer.bucket_index.size)
        laid_out[slice(*self._range(weight))] = kept.flatten()
        mine = self._slice([laid_out])
        if self.passes:
            self._lookups.setdefault(name, torch.zeros_like(mine)).add_(mine)
        else:
            self.buffer.get_shard_from_local_buffer().add_(mine)
            kept.zero_()

    @torch.no_grad()
    def finish(self) -> None:
        """Complete this rank's slice when all passes have ended."""
        if not self.passes:
            return
        for sums in self.sums():
            self.counter.finish(sums)
        for name in (embedding.AHEAD, embedding.LOOKUPS):
            if name in self._lookups:
                self.buffer.data.add_(self._lookups[name])
                self._lookups[name].zero_()

    def zero(self) -> None:
        """Begin a step."""
        for data in self._more:
            data.zero_()


def prepared(original: Callable[..., None], shards: int) -> Callable[..., None]:
    """Return a replacement for MegatronFSDP.__init__. shards: D."""

    def __init__(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        original(self, module, *args, **kwargs)
        from megatron.core.utils import get_model_config

        ranks, config = self.dist_index.get_dp_group().size(), get_model_config(module)
        sums, passes = ExpertGroups.of_ranks(config, ranks), not self.is_delay_grad_reduce
        data_shards.take_turns(passes)
        buffer = self.param_and_grad_buffer
        if passes:
            counter = ShardCounter(shards // ranks, 1, lambda: _sums(buffer, False, True))
            of_kinds = counter, counter
            self.shard_counters = (counter,)
        else:
            of_kinds = self.shard_counters = data_parallel.counters(
                config, shards // ranks, sums, lambda: _sums(buffer, False), lambda: _sums(buffer, True)
            )
        for parameters in buffer.parameter_groups:
            if parameters.main_grad_buffer is not None:
                experts = parameters.is_expert_param
                buffers, copies = (sums.data_buffers, max(1, sums.tp // sums.ep)) if experts else (1, 1)
                parameters.gradient_group = GradientGroup(parameters, of_kinds[experts], passes, buffers, copies)
        for weight in self.raw_param.values():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(lambda _: data_parallel.touch(self))

    return __init__


def _groups(buffer: Any, *, kinds: tuple[bool, ...] = (False, True)) -> Iterator[GradientGroup]:
    """Yield the groups of a ParamAndGradBuffer. kinds: of experts or not."""
    for parameters in buffer.parameter_groups:
        if parameters.main_grad_buffer is not None and parameters.is_expert_param in kinds:
            yield parameters.gradient_group


def _sums(buffer: Any, *kinds: bool) -> list[Tensor]:
    return [sums for group in _groups(buffer, kinds=kinds) for sums in group.sums()]


def reduced_when_ready(original: Callable[..., bool]) -> Callable[..., bool]:
    """Return a replacement for GradReducePipeline._bucket_group_gradient_reduce, which a backward pass calls.

    `wait_for_previous_grad_reduce` waits for what it appends to the queue.
    """

    def _bucket_group_gradient_reduce(self: Any, bucket_group: list[int], *args: Any, **kwargs: Any) -> bool:
        weight_gradient.finish_all()
        self.rs_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.rs_stream):
            for number in bucket_group:
                self.buffer.parameter_groups[number].gradient_group.reduce()
            done = self.rs_stream.record_event()
        for number in bucket_group:
            self.grad_reduce_queue.append((done, partial(_free, self, number), number))
        return True

    return _bucket_group_gradient_reduce


def _free(pipeline: Any, number: int) -> None:
    """Give back the memory of a pass's gradients."""
    pipeline.bucket_grad_ready_params[number] = set()
    buffer = pipeline.get_fsdp_buffer(number)
    buffer.free_bucket_storage()
    buffer.reset_param_main_grad()
    if pipeline.buffer.parameter_groups[number].gradient_group.passes:
        for weight in buffer.params:
            for name in (CONTEXTS, embedding.AHEAD, embedding.LOOKUPS):
                setattr(weight, name, () if name == CONTEXTS else None)


def reduced_at_once(original: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement for ParamAndGradBuffer.reduce_scatter_gradients: without `overlap_grad_reduce`."""

    def reduce_scatter_gradients(self: Any, async_op: bool = True) -> None:
        weight_gradient.finish_all()
        for group in _groups(self):
            group.reduce()

    return reduce_scatter_gradients


def finishing(original: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement for MegatronFSDP.attach_grad_to_optimizer_state, when all micro-batches are done."""

    def attach_grad_to_optimizer_state(self: Any) -> None:
        for group in _groups(self.param_and_grad_buffer):
            group.finish()
        original(self)
        for counter in self.shard_counters:
            counter.restart()

    return attach_grad_to_optimizer_state


def zeroing(original: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement for ParamAndGradBuffer.zero_grad, which begins a step."""

    def zero_grad(self: Any) -> None:
        original(self)
        fp8.changed()
        for group in _groups(self):
            group.zero()

    return zero_grad
