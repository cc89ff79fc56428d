# SPDX-License-Identifier: Apache-2.0
"""Megatron's DistributedDataParallel with one order of additions for every number of data-parallel ranks.

A step's gradient is a tree over C context shards (numerics/sums/data_shards.py), and each of these a tree over D
data shards (numerics/sums/data_shards.py). cp and dp decide only which rank computes which shards: a rank adds up its
own, and the ranks' sums are added by the same tree (numerics/sums/bucket_reduction.py). Of experts it is a tree over X
groups, which have other buffers (numerics/sums/expert_groups.py).

    a micro-batch's backward pass ends    ShardCounter.end_micro_batch, beside the next forward pass
    a bucket's gradients are complete     _complete: norm weights, then the rank's shards, then the groups of data
                                          shards that an owner of experts has in one pass
    then                                  reduce-scatter (distributed optimizer) or all-reduce, a tree over the ranks

With `overlap_grad_reduce` a bucket is complete while the last backward pass still runs. What follows the norm weights
then has a stream of its own.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.numerics.layers import embedding
from tp_invariant_recipes.numerics.layers.formats import fp8
from tp_invariant_recipes.numerics.sums import bucket_reduction, data_shards, weight_gradient
from tp_invariant_recipes.numerics.sums.data_shards import ShardCounter
from tp_invariant_recipes.numerics.sums.expert_groups import ExpertGroups
from tp_invariant_recipes.numerics.sums.weight_gradient import CONTEXTS, LEAF

# Classes that read the weights of modules below them, which then never run.
READ_BELOW = ("SequentialMLP", "TEGroupedMLP", "MambaMixer", "GatedDeltaNet", "ParallelLinearAdapter")

_touched: dict[int, Any] = {}  # models that a backward pass has gradients for
# Called with a model when its micro-batch's backward pass has ended, before its gradients are put away.
micro_batch_listener: Callable[[Any], None] | None = None


def prepared(original: Callable[..., None], shards: int | None, contexts: int | None) -> Callable[..., None]:
    """Return a replacement for DistributedDataParallel.__init__.

    shards:   D. None: as many as there are ranks, and Megatron's own factor of 1/dp stays where it is.
    contexts: C, None for 1; gradients of the context shards of a rank are kept apart until they are summed over ranks.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        ranks = self.dp_group.size()
        sums = ExpertGroups.of_ranks(self.config, ranks)
        dense = experts = ShardCounter(1, 1, list)
        if shards is not None:
            # The loss was divided by the sequences of all ranks (`divided_by_all_ranks`).
            for bucket in (bucket for buffer in _buffers(self) for bucket in buffer.buckets):
                bucket.gradient_scaling_factor = 1.0
            dense, experts = counters(
                self.config, shards // ranks, sums, lambda: _of_dense(self), lambda: _of_experts(self)
            )
        data_shards.take_turns(False)
        self.shard_counters, self.context_ranks = (dense, experts), sums.cp
        of_context = (contexts or 1) // sums.cp
        for weight in self.params_with_grad:
            setattr(weight, embedding.PASSES, dense.each if shards is not None and dense.shards == 1 else 0)
        _prepare(self.buffers, self.bucket_groups, dense, (1, of_context), (sums.cp, 1))
        _prepare(
            self.expert_parallel_buffers, self.expert_parallel_bucket_groups, experts,
            (sums.data_buffers, sums.context_buffers), (sums.places[1], max(1, sums.tp // sums.ep)),
        )  # fmt: skip

    return __init__


def _prepare(
    buffers: Sequence[Any], groups: Sequence[Any], counter: ShardCounter, sums: tuple[int, int], ranks: tuple[int, int]
) -> None:
    """Tell groups of buckets how their gradients are added up, and give buffers others of their shape.

    sums: of data shards and of context shards, that a backward pass adds to. ranks: cp and copies as of
          bucket_reduction.py.
    """
    for group in groups:
        group.shard_counter, group.sums, group.context_ranks = counter, sums, ranks
    for buffer in buffers:
        buffer.context_data = [torch.zeros_like(buffer.grad_data) for _ in range(math.prod(sums) - 1)]
        for weight, (start, end, *_) in buffer.param_index_map.items():
            setattr(weight, LEAF, counter.pairs)
            setattr(weight, CONTEXTS, [data[start:end].view(weight.main_grad.shape) for data in buffer.context_data])
        for bucket in buffer.buckets:
            bucket.buffers = (buffer.grad_data, *buffer.context_data)


def tied_weights_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for DistributedOptimizer.compute_full_param_layout: a tied weight has a bucket of its own,
    which is complete before the layers' are. Otherwise it is the last, with all that the first layer has left.
    """

    def compute_full_param_layout(weights: Sequence[Any], bucket_size: int | None, *args: Any, **kwargs: Any) -> Any:
        for weight in weights if bucket_size else ():
            if getattr(weight, embedding.MARK, False):
                weight.shared_embedding = True
        return original(weights, bucket_size, *args, **kwargs)

    return compute_full_param_layout


def counters(
    config: Any,
    of_rank: int,
    sums: ExpertGroups,
    of_dense: Callable[[], list[Tensor]],
    of_experts: Callable[[], list[Tensor]],
) -> tuple[ShardCounter, ShardCounter]:
    """Return what adds up the gradients of a rank's consecutive data shards: of experts, and of all else.

    of_rank: D/dp. of_dense, of_experts: return all that backward passes add to.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    # A backward pass adds to each number of a gradient once: one sequence, one use of each weight.
    once = not (getattr(config, "mtp_num_layers", None) or getattr(config, "packed_sequences", False))
    each = get_num_microbatches() // of_rank
    turns = sums.turns if config.num_moe_experts else 1
    dense = ShardCounter(of_rank, each, of_dense, turns=turns, once=once)
    once = once and len(sums.chain) == 1
    return dense, ShardCounter(of_rank // turns, turns * each, of_experts, once=once)


def _buffers(model: Any) -> list[Any]:
    return model.buffers + model.expert_parallel_buffers


def gradients(model: Any) -> list[Tensor]:
    """All that backward passes add to."""
    return _of_dense(model) + _of_experts(model)


def _of_experts(model: Any) -> list[Tensor]:
    return [data for buffer in model.expert_parallel_buffers for data in (buffer.grad_data, *buffer.context_data)]


def _of_dense(model: Any) -> list[Tensor]:
    gradients = [data for buffer in model.buffers for data in (buffer.grad_data, *buffer.context_data)]
    return gradients + [kept for weight in model.params_with_grad for kept in embedding.sums_of_their_own(weight)]


def recording_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for DistributedDataParallel._make_backward_post_hook."""

    def _make_backward_post_hook(self: Any, param: Tensor) -> Callable[..., None]:
        hook = original(self, param)

        def noting(*unused: Any) -> None:
            touch(self)
            hook(*unused)

        return noting

    return _make_backward_post_hook


def touch(model: Any) -> None:
    """Note that the backward pass that runs has a gradient for the model."""
    _touched[id(model)] = model


def ending_a_micro_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for megatron.core.pipeline_parallel.schedules.backward_step: one micro-batch, one model
    chunk.
    """

    def backward_step(*args: Any, **kwargs: Any) -> Any:
        _touched.clear()
        data_shards.wait()
        try:
            result = original(*args, **kwargs)
            for model in _touched.values():
                if micro_batch_listener is not None:
                    micro_batch_listener(model)
                for counter in model.shard_counters:
                    if counter.shards > 1:
                        counter.end_micro_batch()
            return result
        except BaseException:
            weight_gradient.forget()
            raise
        finally:
            _touched.clear()

    return backward_step


def divided_by_all_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for megatron.core.pipeline_parallel.schedules.forward_step_calc_loss.

    Megatron divides a loss by this rank's micro-batches, and the gradients by the ranks. One division by the GEMM
    has the same rounding for every dp, also where a gradient is subnormal. The ranks of a context-parallel group share
    sequences, and their tokens were counted together (numerics/megatron/attention/core_attention.py).
    """

    def forward_step_calc_loss(
        model: Any, output: Any, loss_func: Any, config: Any, vp_stage: Any, collect: Any, num: int, store: Any,
        cp_group_size: int | None = None, is_last_stage: bool | None = None,
    ) -> Any:  # fmt: skip
        from megatron.core import parallel_state

        if cp_group_size is None and is_last_stage is None:  # the combined schedule leaves both to this function
            cp_group_size, is_last_stage = 1, parallel_state.is_pipeline_last_stage(False, vp_stage)
        num *= parallel_state.get_data_parallel_world_size()
        # A load-balancing loss is that of all ranks' tokens too: not to be multiplied by cp.
        alone = cp_group_size and 1
        return original(model, output, loss_func, config, vp_stage, collect, num, store, alone, is_last_stage)

    return forward_step_calc_loss


def tree_over_ranks(original: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement for start_grad_sync of Megatron's groups of buckets.

    `finish_grad_sync` waits for its handle.
    """

    def start_grad_sync(self: Any, force_all_reduce: bool | None = False) -> None:
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        if self.grad_reduce_handle is not None:
            raise RuntimeError("a bucket is being reduced already")
        weight_gradient.finish_all()
        if not self.ddp_config.overlap_grad_reduce:
            _reduce(self, force_all_reduce)
            return
        stream = _stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _reduce(self, force_all_reduce)
        self.grad_reduce_handle = stream.record_event()  # `wait` has the current stream wait

    return start_grad_sync


@lru_cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _reduce(group: Any, force_all_reduce: bool | None) -> None:
    _complete(group)
    config, ranks = group.ddp_config, getattr(group, "context_ranks", (1, 1))
    if config.check_for_nan_in_grad or config.check_for_large_grads:
        _check(group)
    scatter = config.use_distributed_optimizer and not force_all_reduce
    over = (
        group.intra_distributed_optimizer_instance_group
        if config.use_distributed_optimizer
        else group.data_parallel_group
    )
    reduce = bucket_reduction.reduce_scatter if scatter else bucket_reduction.all_reduce
    for bucket in group.buckets:
        reduce(_of_contexts(group, bucket), over, *ranks)


def _of_contexts(group: Any, bucket: Any) -> list[Tensor]:
    """Return a bucket's complete gradients of each context shard, or group of some, of this rank."""
    return _of_bucket(bucket)[: getattr(group, "sums", (1, 1))[1]]


def _of_bucket(bucket: Any) -> list[Tensor]:
    """All sums of a bucket's gradients, those of context shards side by side; they begin with `bucket.grad_data`."""
    start, stop = bucket.offset, bucket.offset + bucket.grad_data.numel()
    return [bucket.grad_data, *(data[start:stop] for data in getattr(bucket, "buffers", ())[1:])]


def _check(group: Any) -> None:
    """Megatron's check of a group's gradients, of each context shard."""
    config, kept = group.ddp_config, [bucket.grad_data for bucket in group.buckets]
    try:
        for of_context in zip(*(_of_contexts(group, bucket) for bucket in group.buckets), strict=True):
            for bucket, gradients in zip(group.buckets, of_context, strict=True):
                bucket.grad_data = gradients
            group.check_grads(
                check_for_nan_or_inf=config.check_for_nan_in_grad, check_for_large=config.check_for_large_grads
            )
    finally:
        for bucket, gradients in zip(group.buckets, kept, strict=True):
            bucket.grad_data = gradients


@torch.no_grad()
def _complete(group: Any) -> None:
    """Bring the gradients of a group of buckets to what this rank contributes to the sum over ranks."""
    counter = getattr(group, "shard_counter", None)
    for bucket in group.buckets:
        if counter is not None and counter.shards > 1:
            part = slice(bucket.offset, bucket.offset + bucket.grad_data.numel())
            for data in bucket.buffers:
                counter.finish(data, part)
        gradients, factor = _of_bucket(bucket), bucket.gradient_scaling_factor
        if factor != 1.0:  # before any sum: (a + b) / 2 is not a/2 + b/2 where a half is subnormal
            torch._foreach_mul_(gradients, factor)
        add_neighbours(gradients, getattr(group, "sums", (1, 1))[1])


def add_neighbours(gradients: list[Tensor], contexts: int = 1) -> None:
    """Add gradients of data shards in tree order, into the first. contexts: gradients of each, side by side."""
    while len(gradients) > contexts:
        pairs = [gradients[n : n + contexts] for n in range(0, len(gradients), contexts)]
        for total, addend in zip(pairs[::2], pairs[1::2], strict=True):
            torch._foreach_add_(total, addend)
        gradients = [gradient for pair in pairs[::2] for gradient in pair]


def restarting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for DistributedDataParallel.finish_grad_sync, which runs when all micro-batches are done."""

    def finish_grad_sync(self: Any, force_all_reduce: bool | None = False) -> Any:
        result = original(self, force_all_reduce=force_all_reduce)
        scatter = self.ddp_config.use_distributed_optimizer and not force_all_reduce
        for weight in self.module.parameters():
            for kept in embedding.sums_of_their_own(weight):
                _add_lookups(self, weight, kept, scatter)
            embedding.begin_step(weight)
        for counter in self.shard_counters:
            counter.restart()
        return result

    return finish_grad_sync


def zeroing_contexts(original: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement for DistributedDataParallel.zero_grad_buffer, which begins a step, also after graphs'
    capture.
    """

    def zero_grad_buffer(self: Any) -> None:
        original(self)
        fp8.changed()
        for data in (data for buffer in _buffers(self) for data in buffer.context_data):
            data.zero_()

    return zero_grad_buffer


@torch.no_grad()
def _add_lookups(model: Any, weight: Any, lookups: Tensor, scatter: bool) -> None:
    """Add the sum of an embedding's lookups, complete, to what main_grad has, complete.

    scatter: whether each rank has, and needs, the sum of its slice of the bucket alone.
    """
    counter = model.shard_counters[0]
    if counter.shards > 1:
        counter.finish(lookups)
    factor = model.buffers[0].buckets[0].gradient_scaling_factor
    if factor != 1.0:
        lookups.mul_(factor)
    partials, group, mine = [*lookups.flatten(1)], model.dp_cp_group, slice(None)
    if scatter:
        parts = _slices(model, weight, group.size())
        bucket_reduction.reduce_scatter(partials, group, model.context_ranks, parts=parts)
        mine = parts[group.rank()]
    else:
        bucket_reduction.all_reduce(partials, group, model.context_ranks)
    weight.main_grad.view(-1)[mine].add_(partials[0][mine])


def _slices(model: Any, weight: Any, ranks: int) -> list[slice]:
    """Return the ranks' slices of the weight's bucket, as far as they lie in the weight."""
    buffer = next(buffer for buffer in _buffers(model) if weight in buffer.param_index_map)
    start, end, number, *_ = buffer.param_index_map[weight]
    bucket = buffer.buckets[number]
    ends = (bucket.offset + bucket.grad_data.numel() * rank // ranks for rank in range(ranks + 1))
    cuts = [min(max(cut, start), end) - start for cut in ends]
    return [*map(slice, cuts, cuts[1:])]


def reading_below(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for DistributedDataParallel._make_forward_pre_hook, which waits for weights on their way."""

    def _make_forward_pre_hook(self: Any) -> Callable[..., None]:
        hook = original(self)

        def waiting(module: Any, *unused: Any) -> None:
            names = {kind.__name__ for kind in type(module).__mro__}
            for submodule in module.modules() if names.intersection(READ_BELOW) else (module,):
                hook(submodule)

        return waiting

    return _make_forward_pre_hook
