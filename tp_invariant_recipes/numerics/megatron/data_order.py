# SPDX-License-Identifier: Apache-2.0
"""The sequences of a step, and the data-parallel rank that computes each: consecutive ones, in order.

A step has B sequences, numbered as the data set has them. Data shard d of D has those from d · B/D on, and rank r of dp
those from r · B/dp on: its shards, one after the other. The rank computes them one at a time. So neither dp nor the
micro-batch size changes which shard a sequence belongs to, or the order in a shard. The same holds for validation and
tests. In training the shards of an expert group take turns (numerics/sums/expert_groups.py). Where a pass is a data
shard (numerics/megatron/fsdp.py), rank r of dp has instead the sequences r, dp + r, 2 dp + r …

Megatron's own samplers deal micro-batches, or examples for fine-tuning, to the ranks in turn. The one that Bridge has
for validation draws them at random, in an order that depends on dp and micro-batch size.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from tp_invariant_recipes.numerics.sums import data_shards, expert_groups
from tp_invariant_recipes.replacement import Replacement, applied


class ConsecutiveSampler:
    """The numbers of a rank's sequences, micro-batch by micro-batch; for torch's DataLoader.

    The arguments are those of Megatron's sampler, and
    batch:  B, a multiple of micro-batch size times ranks. Steps that are not whole are left out.
    shards: D. Where ranks take data shards of one sequence in turn, the micro-batch size is 1.
    cyclic: whether the whole steps come again and again, one pass for each time that the sampler is iterated.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
        *,
        batch: int,
        shards: int | None = None,
        cyclic: bool = False,
    ) -> None:
        whole = total_samples // batch * batch
        if cyclic and whole:
            consumed_samples %= whole
        if consumed_samples >= (whole if cyclic else total_samples):
            raise ValueError(f"no sequences are left: {consumed_samples} of {total_samples} are used")
        if batch % (micro_batch_size * data_parallel_size):
            raise ValueError(f"{data_parallel_size} ranks of {micro_batch_size} do not divide {batch} sequences")
        self.total, self.consumed, self.batch = total_samples, consumed_samples, batch
        self.size, self.each, self.cyclic = micro_batch_size, batch // data_parallel_size, cyclic
        self.turns = data_shards.in_turn(batch, shards)
        self.rank, self.ranks = data_parallel_rank, data_parallel_size

    def __len__(self) -> int:
        """All sequences, as Megatron's has it."""
        return self.total

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the sequences of each micro-batch."""
        begin = self.consumed
        if self.cyclic:
            self.consumed = 0
        for step in range(begin, self.total - self.batch + 1, self.batch):
            if self.turns:
                yield from ([number] for number in range(step + self.rank, step + self.batch, self.ranks))
                continue
            first = step + self.rank * self.each
            for start in range(first, first + self.each, self.size):
                yield list(range(start, start + self.size))


class ConsecutiveBatchSampler:
    """The numbers of a rank's examples, all of a step at once; for torch's DataLoader.

    whole:  Megatron's sampler for fine-tuning on one rank, which shuffles each epoch and yields the B examples of a
            step.
    shards: D, as above.
    """

    def __init__(self, whole: Iterable[list[int]], rank: int, ranks: int, shards: int | None = None) -> None:
        self.whole, self.rank, self.ranks, self.shards = whole, rank, ranks, shards

    def __len__(self) -> int:
        """Return steps until the examples are used up."""
        return len(self.whole)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the examples of each step. Raises ValueError: a step's do not divide by the ranks."""
        for step in self.whole:
            each, rest = divmod(len(step), self.ranks)
            if rest:
                raise ValueError(f"{self.ranks} ranks do not divide the {len(step)} examples of a step")
            turns = data_shards.in_turn(len(step), self.shards)
            yield step[self.rank :: self.ranks] if turns else step[self.rank * each : (self.rank + 1) * each]


def _of_rank(original: Callable[..., Any], shards: int) -> Callable[..., ConsecutiveBatchSampler]:
    def sampler(*, data_parallel_rank: int, data_parallel_size: int, **more: Any) -> ConsecutiveBatchSampler:
        whole = original(data_parallel_rank=0, data_parallel_size=1, **more)
        return ConsecutiveBatchSampler(whole, data_parallel_rank, data_parallel_size, shards)

    return sampler


def consecutive(original: Callable[..., Any], shards: int) -> Callable[..., Any]:
    """Get a replacement for build_pretraining_data_loader of Bridge's loaders: it builds Megatron's sampler by name.

    shards: D.
    """

    def build_pretraining_data_loader(*args: Any, global_batch_size: int | None = None, **kwargs: Any) -> Any:
        if global_batch_size is None:
            raise ValueError("which sequences a rank computes follows from the global batch size, and none is given")
        sampler = partial(ConsecutiveSampler, batch=global_batch_size, shards=shards)

        def validation(dataset: Any, *, data_sharding: bool, **more: Any) -> ConsecutiveSampler:
            return sampler(cyclic=True, **more)

        samplers, why = "megatron.bridge.data.samplers", "it deals them in turn"
        rows = [
            Replacement(f"{samplers}:MegatronPretrainingSampler", lambda _: sampler, why),
            Replacement(f"{samplers}:MegatronPretrainingBatchSampler", partial(_of_rank, shards=shards), why),
            Replacement(f"{samplers}:MegatronPretrainingRandomSampler", lambda _: validation, "its order follows dp"),
        ]
        with applied(rows):
            return original(*args, global_batch_size=global_batch_size, **kwargs)

    return build_pretraining_data_loader


def in_turns(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for the get_forward_backward_func of Bridge's train().

    The results have the order of the data.
    """

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        run = original(*args, **kwargs)

        def forward_backward(*args: Any, data_iterator: Any, model: Any, **kwargs: Any) -> Any:
            from megatron.core.utils import get_model_config

            visits = expert_groups.visits_of(get_model_config(model[0]))
            if not visits:
                return run(*args, data_iterator=data_iterator, model=model, **kwargs)
            chunks = isinstance(data_iterator, list)
            iterators = [_visiting(iterator, visits) for iterator in (data_iterator if chunks else [data_iterator])]
            expert_groups.enter(visits)
            try:
                losses = run(*args, data_iterator=iterators if chunks else iterators[0], model=model, **kwargs)
            finally:
                expert_groups.enter(())
            return [losses[visits.index(number)] for number in range(len(visits))] if losses else losses

        return forward_backward

    return get_forward_backward_func


def _visiting(batches: Iterator[Any] | None, visits: Sequence[int]) -> Iterator[Any] | None:
    """Yield the micro-batches of a step in the order of the visits."""
    if batches is None:
        return None
    step = [next(batches) for _ in visits]
    return iter([step[number] for number in visits])
