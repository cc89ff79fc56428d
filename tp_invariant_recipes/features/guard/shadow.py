# SPDX-License-Identifier: Apache-2.0
"""Shadow steps: a replica computes a data shard of another one, rank by rank, before its own passes.

    replica 0                   replica 1
    data shard of replica 1     data shard of replica 0      the shadow: nothing is reduced, logged or counted
                                                             (its first sequence, where data shards take turns)
    zero the gradients          zero the gradients
    its own step                its own step                 its first data shard is digested on the way

Both have digests of every module's tensors, both ways, in the order of execution, and of every gradient. The first that
differ name the operation. Then the ranks compute both data shards once more, with every GEMM sampled: a rank whose
GEMM the host's CPU does not confirm is wrong, or one that does not repeat its own bits. A processor that always
fails at one place of a launch does repeat them. So each rank computes both data shards once more side by side, as one
micro-batch of both: what does not depend on the layout must have the same bits in other places of a launch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tp_invariant_recipes.features.guard.judge import SilentDataCorruption
from tp_invariant_recipes.features.guard.memory import (
    BACKWARD,
    FORWARD,
    BatchedSite,
    Event,
    ShardRecording,
    added,
    first_unlike,
    hash_of,
)
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.numerics.megatron import data_parallel
from tp_invariant_recipes.numerics.megatron.router import InvariantTopKRouter
from tp_invariant_recipes.observe.shards import unwrapped
from tp_invariant_recipes.observe.union import gathered
from tp_invariant_recipes.replacement import Replacement, applied

Recompute = Callable[..., list["ReplicaPair"]]

WHY = "a guard recomputes a data shard of another replica before the step's own passes"
LOSS = "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss"
METRICS = (
    "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.record",
    "megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper.save_metrics_to_tracker",
)


def replacement(due: Callable[[], "Shadow | None"]) -> Replacement:
    """Replace the function that gives Bridge the passes of a step. due: what runs them; None: it is no recomputation
    on another replica."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_forward_backward(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            run = original(*args, **kwargs)

            def forward_backward(*args: Any, **kwargs: Any) -> Any:
                shadow = None if kwargs.get("forward_only") else due()
                return run(*args, **kwargs) if shadow is None else shadow.step(run, kwargs)

            return forward_backward

        return get_forward_backward

    return Replacement("megatron.bridge.training.train:get_forward_backward_func", make, WHY)


@dataclass(frozen=True)
class Shadow:
    """The passes of recomputations on another replica.

    rank_distance: data-parallel ranks from a replica to the one whose data shard it repeats. shards: data shards.
    names:         of the trained weights. state: Bridge's GlobalState.
    site:          where this rank stands, as of a trace.
    judged:        called with the pairs of a recomputation on another replica, and with what computes both data shards
    once more: as before,
                   or side by side. This gives pairs of each rank with itself.
    """

    rank_distance: int
    shards: int
    names: dict[Tensor, str]
    state: Any
    site: Any
    judged: Callable[[list["ReplicaPair"], Recompute], None]

    def step(self, run: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Run a step's passes, and judge them. run: Megatron's forward and backward pass; kwargs: its arguments."""
        group = parallel_state.get_data_parallel_group()
        count = kwargs["num_microbatches"] // max(1, self.shards // group.size())
        if self.site.visits:  # the shards take turns: buffers have one's gradient alone after its first sequence
            count = 1
        data = kwargs["data_iterator"]
        iterators = data if isinstance(data, list) else [data]
        taken = [None if iterator is None else [next(iterator) for _ in range(count)] for iterator in iterators]
        whole = [
            None if batches is None else _ahead(batches, iterator)
            for batches, iterator in zip(taken, iterators, strict=True)
        ]
        own_batches, kwargs = taken, {**kwargs, "data_iterator": whole if isinstance(data, list) else whole[0]}
        shadow_batches = _exchanged(own_batches, group, self.rank_distance)
        there = replace(self.site, dp_rank=(group.rank() + self.rank_distance) % group.size())
        held = [buffer.clone() for buffer in _buffers(kwargs["model"])]
        shadow = self._isolated(run, kwargs, shadow_batches, there, count, held)
        own = ShardRecording(kwargs["model"], self.names, self.site, count)
        with own.on():
            result = run(**kwargs)
        first, second = own.events(), shadow.events()
        pairs = self._pairs(first, second, group)

        def recompute(*, in_one_launch: bool) -> list["ReplicaPair"]:
            """Compute this rank's data shard and the shadow again, and compare with what it computed before."""
            if in_one_launch:
                depth, sites = max(pair.depth for pair in pairs) + 1, BatchedSite.from_sites(self.site, there)
                both = self._isolated(run, kwargs, _joined(own_batches, shadow_batches), sites, count, held, parts=2)
                unlike = [first_unlike(added(first, second, both.events())[:depth], both.events()[:depth])]
            else:
                mine = self._isolated(run, kwargs, own_batches, self.site, count, held).events()
                other = self._isolated(run, kwargs, shadow_batches, there, count, held).events()
                unlike = [first_unlike(a, b) for a, b in ((first, mine), (second, other))]
            every = gathered(
                [min((event for event in unlike if event), key=lambda event: event[1], default=None)], group
            )
            return [ReplicaPair(n, n, *(answer[0] or (None, 0))) for n, answer in enumerate(every)]

        self.judged(pairs, recompute)
        return result

    def _pairs(self, own: list[Event], shadow: list[Event], group: Any) -> list["ReplicaPair"]:
        size = group.size()
        every = gathered([hash_of(own), hash_of(shadow)], group)
        unlike = [n for n in range(size) if every[n][0] != every[(n - self.rank_distance) % size][1]]
        everything = gathered([own, shadow], group) if any(gathered(bool(unlike))) else []
        pairs = []
        for n in range(size):
            m = (n - self.rank_distance) % size
            event = first_unlike(everything[n][0], everything[m][1]) if n in unlike else None
            pairs.append(ReplicaPair(n, m, *(event or (None, 0))))
        return pairs

    def _isolated(
        self,
        run: Callable[..., Any],
        kwargs: dict[str, Any],
        batches: list[Any],
        site: Any,
        count: int,
        held: list[Tensor],
        parts: int = 1,
    ) -> ShardRecording:
        """Compute some micro-batches. Gradients are zero before and after; nothing else changes.

        held: what the model's buffers held as the step began. parts: how many micro-batches of a step each of these
        consists of.
        """
        model, total = kwargs["model"], kwargs["num_microbatches"] / parts
        size = kwargs["micro_batch_size"] * parts
        iterators = [None if chunk_batches is None else iter(chunk_batches) for chunk_batches in batches]
        data = iterators if isinstance(kwargs["data_iterator"], list) else iterators[0]
        recording = ShardRecording(model, self.names, site, count)
        with _restoring_state(model, self.state, total, held, parts), recording.on():
            _zero(model)
            run(**kwargs | {"data_iterator": data, "num_microbatches": count, "micro_batch_size": size})
            _zero(model)
        return recording


def _joined(own: list[Any], shadow: list[Any]) -> list[Any]:
    """Micro-batches of two sizes: own and shadow one after the other in each."""

    def join(batch: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        return {k: None if x is None else torch.cat([x, other[k].to(x.device)]) for k, x in batch.items()}

    return [
        batches and [join(*pair) for pair in zip(batches, more, strict=True)]
        for batches, more in zip(own, shadow, strict=True)
    ]


def _ahead(taken: list[Any], rest: Any) -> Iterator[Any]:
    yield from taken
    while True:
        yield next(rest)


def _tensors(batch: dict[str, Any]) -> list[str]:
    return [key for key in sorted(batch) if batch[key] is not None]


def _exchanged(chunks: list[Any], group: Any, rank_distance: int) -> list[Any]:
    """Return the micro-batches of the replica `rank_distance` ahead; own ones go to the one that computes them."""
    ranks, here = dist.get_process_group_ranks(group), group.rank()
    source, target = ranks[(here + rank_distance) % len(ranks)], ranks[(here - rank_distance) % len(ranks)]
    sending = [_words(batch[key]) for batches in chunks for batch in batches or () for key in _tensors(batch)]
    arriving = [torch.empty_like(tensor) for tensor in sending]
    transfers = [dist.P2POp(dist.isend, tensor, target, group) for tensor in sending]
    transfers += [dist.P2POp(dist.irecv, tensor, source, group) for tensor in arriving]
    for transfer in dist.batch_isend_irecv(transfers) if transfers else ():
        transfer.wait()
    words = iter(arriving)

    def received(batch: dict[str, Any]) -> dict[str, Any]:
        there = {key: next(words) for key in _tensors(batch)}
        return {
            k: None if tensor is None else there[k].view(tensor.dtype).view(tensor.shape) for k, tensor in batch.items()
        }

    return [None if batches is None else [received(batch) for batch in batches] for batches in chunks]


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes, on the device that collectives take."""
    return tensor.contiguous().cuda().view(-1).view(torch.uint8)


def _buffers(model: list[Any]) -> list[Tensor]:
    return [buffer for chunk in model for buffer in unwrapped(chunk).buffers()]


@contextmanager
def _restoring_state(model: list[Any], state: Any, total: float, held: list[Tensor], parts: int) -> Iterator[None]:
    """Reduce no gradient, count no data shard, log nothing, and give back what a forward pass counts.

    total: micro-batches of a step, by which a loss is divided; half of one where two are joined.
    held: what buffers hold meanwhile: the end of a step's passes moves the biases of experts.
    parts: data shards that are computed side by side. Routers balance each by itself.
    """
    from megatron.core.utils import get_model_config

    config = get_model_config(model[0])

    def of_a_step(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: original(*args[:6], total, *args[7:], **kwargs)

    def unrecorded(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: None

    with ExitStack() as stack:
        for chunk in model:
            stack.enter_context(chunk.no_sync())
            _set(stack, chunk, shard_counters=())
        _set(stack, config, finalize_model_grads_func=None, no_sync_func=None, grad_sync_func=None)
        counted = {name: value for name, value in vars(state).items() if name.startswith("_flops_")}
        stack.callback(vars(state).update, counted)
        for buffer, then in zip(_buffers(model), held, strict=True):
            stack.callback(buffer.copy_, buffer.clone())
            buffer.copy_(then)
        for router in (
            module for chunk in model for module in chunk.modules() if isinstance(module, InvariantTopKRouter)
        ):
            _set(stack, router, **router.of_other_shards(parts))
        metrics = [Replacement(target, unrecorded, WHY) for target in METRICS]
        stack.enter_context(applied([Replacement(LOSS, of_a_step, WHY), *metrics]))
        yield


def _set(stack: ExitStack, owner: Any, **values: Any) -> None:
    for name, value in values.items():
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


@torch.no_grad()
def _zero(model: list[Any]) -> None:
    """Megatron's zero_grad_buffer would also have it reduce the gradients of the next backward pass."""
    for gradient in (gradient for chunk in model for gradient in data_parallel.gradients(chunk)):
        gradient.zero_()


@dataclass(frozen=True)
class ReplicaPair:
    """Two replicas that have computed the same data shard, by their places in the data-parallel group, and the first
    operation that differs; None: none does. depth: its place in the order of execution."""

    own: int
    shadow: int
    first: str | None
    depth: int = 0


@dataclass(frozen=True)
class Suspicion:
    """Replicas that differ. order: of the first operation, among those of all ranks: what others have received of a
    wrong rank differs later. ranks: one of which is wrong. judge: as of `Evidence`; None: nothing has told them apart.
    """

    order: tuple[int, int, int]
    where: str
    ranks: tuple[int, ...]
    judge: str | None
    pairs: tuple[dict[str, Any], ...]

    def wrong_bits(self, step: int) -> SilentDataCorruption:
        """To be reported."""
        details = {"pairs": list(self.pairs)}
        return SilentDataCorruption(evidence.SHADOW, step, self.where, self.ranks, judge=self.judge, details=details)


def of_replicas(pairs: Iterable[ReplicaPair], group: Sequence[int], stage: int) -> Suspicion | None:
    """Suspect replicas of this rank; None: they agree. group: their ranks. stage: of the pipeline."""
    unlike = [pair for pair in pairs if pair.first is not None]
    if not unlike:
        return None
    first = min(unlike, key=lambda pair: pair.depth)
    passes = [str(first.first).startswith(which) for which in (FORWARD, BACKWARD)]
    order = (0, stage) if passes[0] else (1, -stage) if passes[1] else (2, 0)
    places = [n for pair in unlike for n in (pair.own, pair.shadow)]
    most = max(map(places.count, places))
    chosen = {n for n in places if places.count(n) == most}  # of three replicas, one is in two pairs
    judge = "a third replica" if len(chosen) == 1 else None
    ranks = tuple(sorted(group[n] for n in (chosen if judge else set(places))))
    shown = tuple({"own": group[p.own], "shadow": group[p.shadow], "first": p.first} for p in unlike)
    return Suspicion((*order, first.depth), str(first.first), ranks, judge, shown)


def narrowed(
    suspicion: Suspicion | None, repeated: Iterable[ReplicaPair], group: Sequence[int], judge: str
) -> Suspicion | None:
    """Return the ranks that do not repeat their own bits, if any. judge: what has told one from the others."""
    unsteady = tuple(sorted(group[pair.own] for pair in repeated if pair.first is not None))
    if suspicion is None or not unsteady:
        return suspicion
    return replace(suspicion, ranks=unsteady, judge=judge if len(unsteady) == 1 else None)


def earliest(suspicion: Suspicion | None) -> Suspicion | None:
    """Return the first of all ranks' suspicions in the order of execution. A collective."""
    return first_of(gathered(suspicion))


def first_of(every: Iterable[Suspicion | None]) -> Suspicion | None:
    """Return the first in the order of execution; of several there, one of them that suspects the ranks of all."""
    suspicions = [suspicion for suspicion in every if suspicion is not None]
    first = [suspicion for suspicion in suspicions if suspicion.order == min(each.order for each in suspicions)]
    ranks = tuple(sorted({rank for suspicion in first for rank in suspicion.ranks}))
    return replace(first[0], ranks=ranks, judge=first[0].judge if ranks == first[0].ranks else None) if first else None
