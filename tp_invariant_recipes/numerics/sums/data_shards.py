# SPDX-License-Identifier: Apache-2.0
"""Gradients of D virtual data shards on one data-parallel rank: a tree, whatever the number of ranks.

A step's gradient is a tree over D shards, neighbours first. Each shard is the sum of its sequences' gradients, one
after the other. A rank has D/dp consecutive shards, a subtree; it computes them in turn, and adds them as a binary
counter counts, so that it keeps log2(D/dp) sums beside the one that grows:

    shard    0         1              2         3
    level 0  0         –              2         –
    level 1  –         0+1            0+1       –
    result                                      (0+1) + (2+3)

A shard of one micro-batch is a leaf of the tree, so that the backward pass of an odd shard may add its gradient to the
even one's. Then a pair is what the counter counts, with a level less. This takes a backward pass that adds to each
number of a gradient once, as numerics/sums/weight_gradient.py says.

Where shards take turns (numerics/sums/expert_groups.py), each keeps its sum until its next sequence. Then its buffer
and the gradient's exchange their numbers.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.numerics.sums.expert_groups import order_of_visits


def of_a_rank(config: Any) -> int:
    """C/cp: the context shards of each rank. config: a TransformerConfig; without `context_shards` C is cp."""
    cp = config.context_parallel_size
    return getattr(config, "context_shards", cp) // cp


@lru_cache(maxsize=32)  # a CUDA graph cannot hold a copy from the host
def positions(length: int, shards: int, ranks: int = 1, rank: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Return the positions of a rank's tokens in the sequence, in the order in which it holds them.

    length: of the sequence, a multiple of 2C. shards: C. ranks: cp, which divides C. returns: [length/cp] int64,
    for callers to leave as it is.
    """
    if length % (2 * shards):
        raise ValueError(f"{shards} context shards of two chunks each do not divide {length} positions")
    chunks = torch.arange(length).view(2 * shards, -1)
    pairs = torch.stack((chunks[:shards], chunks.flip(0)[:shards]), 1)
    return pairs.view(ranks, -1)[rank].to(device)


def each_context(mesh: Any, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors' parts of each of the mesh's n context shards: views of [tokens/n, …] for [tokens, …]."""
    if mesh.contexts == 1:  # without views, whose making takes the host as long as a launch
        return iter((tensors,))
    return zip(*(tensor.chunk(mesh.contexts) for tensor in tensors), strict=True)


_turns = [False]


def take_turns(turns: bool) -> None:
    """Have ranks compute a step's sequences in turn, or consecutive ones: numerics/megatron/fsdp.py says why."""
    _turns[0] = turns


def in_turn(sequences: int, shards: int | None) -> bool:
    """Whether ranks take the sequences of a step in turn, each of which is a data shard then. shards: D."""
    return _turns[0] and sequences == shards


Node = tuple[int, int]  # of the tree over nodes: level and number

_streams: dict[torch.device, Any] = {}  # device -> the stream of what runs beside a forward pass
_running: list[Any] = []  # events: the ends of what runs there


PIECE = 2**24  # numbers of two buffers that are exchanged at once


class ShardCounter:
    """Adds up the shards of a rank. Without `shards` > 1 it does nothing and keeps nothing.

    shards:    of this rank, a power of two.
    each:      how many micro-batches a shard has.
    gradients: the buffers that the backward passes add to, fp32 of any shape. It is called at the end of a shard,
               since some appear with the first backward pass only.
    turns:     neighbours among the shards that take turns.
    once:      whether a backward pass adds to each number of a gradient once.

    pairs:     whether the backward pass of an odd shard adds to the gradient of the even one.
    nodes:     what is counted: shards, or pairs of them.
    """

    def __init__(
        self, shards: int, each: int, gradients: Callable[[], Iterable[Tensor]], *, turns: int = 1, once: bool = True
    ) -> None:
        self.shards, self.each, self._gradients = shards, each, gradients
        self.pairs = once and shards > 1 and each == 1
        width = 2 if self.pairs else 1
        self.nodes = shards // width
        self._order = [number // each // width for number in order_of_visits(shards, each, turns)]
        self._last = {node: number for number, node in enumerate(self._order)}  # the micro-batch that completes it
        self._passed = 0  # micro-batches
        # gradient -> sum of complete or waiting nodes, by level and number; and memory that has none.
        self._held: dict[Tensor, dict[Node, Tensor]] = {}
        self._free: dict[Tensor, list[Tensor]] = {}

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        """To be called when a backward pass is complete. Raises RuntimeError if there are more than planned.

        On a GPU it returns before the sums are made: `wait` before the next backward pass.
        """
        self._passed += 1
        if self._passed > self.shards * self.each:
            raise RuntimeError(f"a step has more than {self.shards} shards of {self.each} micro-batches")
        done, following = self._order[self._passed - 1], self._order[self._passed % len(self._order)]
        if done == following or self._passed == len(self._order):
            return
        gradients = list(self._gradients())
        if not gradients:  # such as of experts, in a dense model or a pipeline stage without them
            return
        with _beside_the_forward_pass(gradients[0].device):
            for gradient in gradients:
                held, free = self._held.setdefault(gradient, {}), self._free.setdefault(gradient, [])
                self._switch(gradient, held, free, (done, following))

    def _switch(self, gradient: Tensor, held: dict[Node, Tensor], free: list[Tensor], nodes: tuple[int, int]) -> None:
        """Keep the gradient of the first of two nodes, added to all that it completes, and continue with the second."""
        level, number, full = 0, nodes[0], []
        while self._complete(level, number) and self._complete(level, number ^ 1):
            if (level, number ^ 1) in held:  # a buffer that appears late lacks the nodes before
                full.append(held.pop((level, number ^ 1)))
            level, number = level + 1, number // 2
        waiting = held.pop((0, nodes[1]), None)
        if full:
            for node in full[:-1]:
                gradient.add_(node)
            free += full[:-1]
            held[level, number] = full[-1].add_(gradient)
        elif waiting is not None:
            for a, b in zip(gradient.view(-1).split(PIECE), waiting.view(-1).split(PIECE), strict=True):
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)
            held[level, number] = waiting
            return
        else:
            held[level, number] = (free.pop() if free else torch.empty_like(gradient)).copy_(gradient)
        if waiting is None:
            gradient.zero_()
        else:
            gradient.copy_(waiting)
            free.append(waiting)

    def _complete(self, level: int, number: int) -> bool:
        """Whether all micro-batches of a node have ended. The root has no neighbour."""
        nodes = range(number << level, (number + 1) << level)
        return nodes.stop <= self.nodes and all(self._last[node] < self._passed for node in nodes)

    @torch.no_grad()
    def finish(self, gradient: Tensor, part: slice = slice(None)) -> None:
        """Add to the last node's gradient all others. part: of the flat gradient. Call it once for each.

        The last backward pass may still run, if it has completed this part.
        """
        for _, node in sorted(self._held.get(gradient, {}).items(), key=lambda held: held[0][0]):
            gradient.view(-1)[part].add_(node.view(-1)[part])

    def restart(self) -> None:
        """Begin the next step. Raises RuntimeError if this one lacked micro-batches."""
        if self.shards > 1 and self._passed != self.shards * self.each:
            raise RuntimeError(f"a step had {self._passed} micro-batches, not {self.shards} shards of {self.each}")
        self._passed = 0
        for gradient, held in self._held.items():
            self._free[gradient] += held.values()
            held.clear()


@contextmanager
def _beside_the_forward_pass(device: torch.device) -> Iterator[None]:
    """Run the block on a stream of its own, on a GPU: until the next backward pass nobody needs the gradients."""
    if device.type != "cuda":
        yield
        return
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    stream = _streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    _running.append(stream.record_event())


def wait() -> None:
    """Have the current stream wait for the sums of `end_micro_batch`: to be called before a backward pass."""
    while _running:
        torch.cuda.current_stream().wait_event(_running.pop())
