"""Shadow steps: a replica computes a data shard of another one, rank by rank, before its own passes.

    replica 0                   replica 1
    data shard of replica 1     data shard of replica 0      the shadow: nothing is reduced, logged or counted
    zero the gradients          zero the gradients
    its own step                its own step                 its first data shard is digested on the way

Both have digests of every module's tensors, both ways, in the order of execution, and of every gradient. The first that
differ name the operation. Then the ranks compute both data shards once more, with every product sampled: a rank whose
product the host's CPU does not confirm is wrong, or one that does not repeat its own bits.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tp_invariant_recipes.kernels.digest import Lanes
from tp_invariant_recipes.numerics.megatron import data_parallel
from tp_invariant_recipes.numerics.sums.data_shards import ShardCounter
from tp_invariant_recipes.numerics.sums.weight_gradient import gradients_of
from tp_invariant_recipes.replacement import Replacement, applied
from tp_invariant_recipes.training.guard.weights import tables
from tp_invariant_recipes.training.module_hooks import FORWARD, ModuleHooks
from tp_invariant_recipes.training.shards import unwrapped

Event = tuple[str, tuple[int, ...]]  # an operation in words, and the lanes of what it has made

WHY = "a guard repeats a data shard of another replica before the step's own passes"
LOSS = "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss"
METRICS = "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.record"


class _Hooks(ModuleHooks):
    """Hooks of the first micro-batches alone."""

    def __init__(self, site: Any, count: int) -> None:
        super().__init__(site, 0, frozenset(), None)
        self._count = count

    def record(self, key: Any, x: Tensor, module: Any, rule: Any, micro_batch: int) -> None:
        """As of ModuleHooks."""
        if micro_batch < self._count:
            super().record(key, x, module, rule, micro_batch)


class ShardRecording:
    """Digests of the first data shard that a rank computes. names: parameter → name."""

    def __init__(self, model: list[Any], names: dict[Tensor, str], site: Any, count: int) -> None:
        self._model, self._names, self._count = model, names, count
        self._hooks = _Hooks(site, count)
        self._ended: dict[int, int] = {}
        self._gradients: list[tuple[str, Tensor]] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record within the block."""
        for chunk in self._model:
            self._hooks.hook(unwrapped(chunk))
        data_parallel.micro_batch_listener = self._micro_batch_ended
        try:
            yield
        finally:
            data_parallel.micro_batch_listener = None
            self._hooks.unhook()

    def _micro_batch_ended(self, model: Any) -> None:
        self._ended[id(model)] = ended = self._ended.get(id(model), 0) + 1
        if ended != self._count:
            return
        owners = set(unwrapped(model).parameters())
        pieces = [
            (name, piece)
            for owner, name in self._names.items()
            if owner in owners
            for gradient in (*gradients_of(owner), *getattr(owner, data_parallel.experts.LATER, ()))
            for piece in tables(gradient)
        ]
        lanes = Lanes([piece for _, piece in pieces])()
        self._gradients += [(name, lane) for (name, _), lane in zip(pieces, lanes, strict=True)]

    def events(self) -> list[Event]:
        """What was recorded, in order of execution; the host waits for it."""
        found: list[Event] = []
        for seen in self._hooks.seen():
            _, direction, module, tensor = seen.key
            which = "forward pass of" if direction == FORWARD else "backward pass at the"
            end = "" if direction == FORWARD else ("input of " if tensor.startswith("output") else "output of ")
            if not (direction == FORWARD and tensor.startswith("input")):
                found.append((f"{which} {end}{module}", tuple(seen.lanes)))
        return [*found, *((f"weight gradient of {name}", tuple(lane.tolist())) for name, lane in self._gradients)]


@dataclass(frozen=True)
class ReplicaPair:
    """Two replicas that have computed the same data shard, by their places in the data-parallel group, and the first
    operation that differs; None: none does."""

    own: int
    shadow: int
    first: str | None
    depth: int = 0


class Shadow:
    """Runs the passes of a step. due: whether the step is a shadow step. apart: data-parallel ranks from a replica to
    the one whose data shard it repeats. site: where this rank stands, as a trace has it.

    judged: called with the pairs of a shadow step, and with what computes both data shards once more.
    """

    def __init__(self, apart: int, shards: int) -> None:
        self.apart, self.shards = apart, shards
        self.due: Callable[[], bool] = lambda: False
        self.judged: Callable[[list[ReplicaPair], Callable[[], list[ReplicaPair]]], None] = lambda pairs, again: None
        self.site: Any = None
        self.names: dict[Tensor, str] = {}
        self.state: Any = None

    def replacement(self) -> Replacement:
        """Of the function that gives Bridge the passes of a step."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: self._running(original(*args, **kwargs))

        return Replacement("megatron.bridge.training.train:get_forward_backward_func", make, WHY)

    def _running(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("forward_only") or not self.due():
                return run(*args, **kwargs)
            return self._step(run, kwargs)

        return forward_backward

    def _step(self, run: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        group = parallel_state.get_data_parallel_group()
        count = kwargs["num_microbatches"] // max(1, self.shards // group.size())
        ours, kwargs = _taken(kwargs, count)
        theirs = _exchanged(ours, group, self.apart)
        there = replace(self.site, dp_rank=(group.rank() + self.apart) % group.size())
        shadow = self._isolated(run, kwargs, theirs, there, count)
        own = ShardRecording(kwargs["model"], self.names, self.site, count)
        with own.on():
            result = run(**kwargs)
        first, second = own.events(), shadow.events()
        pairs = self._pairs(first, second, group)

        def again() -> list[ReplicaPair]:
            """This rank's data shard and the shadow, against what it has computed itself before."""
            mine = self._isolated(run, kwargs, ours, self.site, count).events()
            other = self._isolated(run, kwargs, theirs, there, count).events()
            unlike = [_first(a, b) for a, b in ((first, mine), (second, other))]
            every = _gathered([min((one for one in unlike if one), key=lambda one: one[1], default=None)], group)
            return [ReplicaPair(n, n, *(found[0] or (None, 0))) for n, found in enumerate(every)]

        self.judged(pairs, again)
        return result

    def _pairs(self, own: list[Event], shadow: list[Event], group: Any) -> list[ReplicaPair]:
        """Of every replica's data shard, who has computed it."""
        size = group.size()
        every = _gathered([hash_of(own), hash_of(shadow)], group)
        unlike = [n for n in range(size) if every[n][0] != every[(n - self.apart) % size][1]]
        everything = _gathered([own, shadow], group) if _anywhere(bool(unlike)) else []
        pairs = []
        for n in range(size):
            m = (n - self.apart) % size
            found = _first(everything[n][0], everything[m][1]) if n in unlike else None
            pairs.append(ReplicaPair(n, m, *(found or (None, 0))))
        return pairs

    def _isolated(
        self, run: Callable[..., Any], kwargs: dict[str, Any], batches: list[Any], site: Any, count: int
    ) -> ShardRecording:
        """Compute some micro-batches. Gradients are zero before and after; nothing else changes."""
        model, total = kwargs["model"], kwargs["num_microbatches"]
        iterators = [None if one is None else iter(one) for one in batches]
        data = iterators if isinstance(kwargs["data_iterator"], list) else iterators[0]
        recording = ShardRecording(model, self.names, site, count)
        with _nothing_else(model, self.state, total), recording.on():
            _zero(model)
            run(**kwargs | {"data_iterator": data, "num_microbatches": count})
            _zero(model)
        return recording


def hash_of(events: list[Event]) -> str:
    """A digest of digests."""
    return hashlib.sha256(repr(events).encode()).hexdigest()


def _first(one: list[Event], other: list[Event]) -> tuple[str, int] | None:
    """The first operation that differs, and its place."""
    for n, (a, b) in enumerate(itertools.zip_longest(one, other, fillvalue=("an operation that only one has", ()))):
        if a != b:
            return a[0], n
    return None


def _gathered(ours: Any, group: Any) -> list[Any]:
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, ours, group=group)
    return everyone


def _anywhere(found: bool) -> bool:
    """Whether a rank of the world has found something: all then go on together."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return any(everyone)


def _taken(kwargs: dict[str, Any], count: int) -> tuple[list[Any], dict[str, Any]]:
    """The first micro-batches of each model chunk's iterator, and the arguments with iterators that still have them."""
    data = kwargs["data_iterator"]
    iterators = data if isinstance(data, list) else [data]
    taken = [None if one is None else [next(one) for _ in range(count)] for one in iterators]
    whole = [None if some is None else _ahead(some, one) for some, one in zip(taken, iterators, strict=True)]
    return taken, {**kwargs, "data_iterator": whole if isinstance(data, list) else whole[0]}


def _ahead(taken: list[Any], rest: Any) -> Iterator[Any]:
    """An iterator of which some has been taken already."""
    yield from taken
    while True:
        yield next(rest)


def _exchanged(ours: list[Any], group: Any, apart: int) -> list[Any]:
    """The micro-batches of the replica `apart` ahead; ours go to the one that computes them."""
    ranks, here = dist.get_process_group_ranks(group), group.rank()
    source, target = ranks[(here + apart) % len(ranks)], ranks[(here - apart) % len(ranks)]
    sending = [_words(one[key]) for some in ours if some for one in some for key in sorted(one) if one[key] is not None]
    arriving = [torch.empty_like(one) for one in sending]
    transfers = [dist.P2POp(dist.isend, one, target, group) for one in sending]
    transfers += [dist.P2POp(dist.irecv, one, source, group) for one in arriving]
    for transfer in dist.batch_isend_irecv(transfers) if transfers else ():
        transfer.wait()
    words = iter(arriving)

    def theirs(batch: dict[str, Any]) -> dict[str, Any]:
        there = {key: next(words) for key in sorted(batch) if batch[key] is not None}
        return {k: None if one is None else there[k].view(one.dtype).view(one.shape) for k, one in batch.items()}

    return [None if some is None else [theirs(one) for one in some] for some in ours]


def _words(tensor: Tensor) -> Tensor:
    """The bytes, on the device that collectives take."""
    return tensor.contiguous().cuda().view(-1).view(torch.uint8)


@contextmanager
def _nothing_else(model: list[Any], state: Any, total: int) -> Iterator[None]:
    """Reduce no gradient, count no data shard, log nothing, and give back what a forward pass counts.

    total: micro-batches of a step, by which a loss is divided.
    """
    from megatron.core.utils import get_model_config

    config, inert = get_model_config(model[0]), ShardCounter(1, 1, list)

    def of_a_step(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: original(*args[:6], total, *args[7:], **kwargs)

    def unrecorded(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: None

    with ExitStack() as stack:
        for chunk in model:
            stack.enter_context(chunk.no_sync())
            _set(stack, chunk, shard_counter=inert)
        _set(stack, config, finalize_model_grads_func=None, no_sync_func=None, grad_sync_func=None)
        counted = {name: value for name, value in vars(state).items() if name.startswith("_flops_")}
        stack.callback(vars(state).update, counted)
        for buffer in (buffer for chunk in model for buffer in unwrapped(chunk).buffers()):
            stack.callback(buffer.copy_, buffer.clone())
        stack.enter_context(applied([Replacement(LOSS, of_a_step, WHY), Replacement(METRICS, unrecorded, WHY)]))
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
