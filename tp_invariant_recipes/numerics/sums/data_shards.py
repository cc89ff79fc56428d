"""Gradients of D virtual data shards on one data-parallel rank: a tree, whatever the number of ranks.

A step's gradient is a tree over D shards, neighbours first. Each shard is the sum of its sequences' gradients, one
after the other. A rank has D/dp consecutive shards, a subtree; it computes them in turn, and adds them as a binary
counter counts, so that it keeps log2(D/dp) sums beside the one that grows:

    shard    0         1              2         3
    level 0  0         –              2         –
    level 1  –         0+1            0+1       –
    result                                      (0+1) + (2+3)

A shard of one micro-batch needs no level 0. Its gradient is a leaf of the tree, so that the backward pass of an odd
shard may add it to the even one's. Then a pair is what the counter counts, with a level less:

    shard    0, 1      2, 3           4, 5      6, 7
    level 0  0+1       –              4+5       –
    level 1  –         (0+1)+(2+3)    (0+1)+(2+3)
    result                                      ((0+1)+(2+3)) + ((4+5)+(6+7))

This takes a backward pass that adds to each number of a gradient once, as numerics/sums/weight_gradient.py says.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_streams: dict[torch.device, Any] = {}  # device -> the stream of what runs beside a forward pass
_running: list[Any] = []  # events: the ends of what runs there


class ShardCounter:
    """Adds up the shards of a rank. Without `shards` > 1 it does nothing and keeps nothing.

    shards:    of this rank, D/dp, a power of two.
    each:      how many micro-batches a shard has.
    gradients: the buffers that the backward passes add to, fp32 of any shape. It is called at the end of a node,
               since some appear with the first backward pass only.
    once:      whether a backward pass adds to each number of a gradient once.

    pairs:     whether the backward pass of an odd shard adds to the gradient of the even one before.
    nodes:     what is counted: shards, or pairs of them.
    """

    def __init__(self, shards: int, each: int, gradients: Callable[[], Iterable[Tensor]], *, once: bool = True) -> None:
        self.shards, self.each, self._gradients = shards, each, gradients
        self.pairs = once and shards > 1 and each == 1
        self.nodes = shards // 2 if self.pairs else shards
        self._passed = 0  # micro-batches
        self._levels: dict[Tensor, list[Tensor]] = {}

    def end_micro_batch(self) -> None:
        """To be called when a backward pass is complete. Raises RuntimeError if there are more than planned.

        On a GPU it returns before the sums are made: `wait` before the next backward pass.
        """
        self._passed += 1
        if self._passed > self.shards * self.each:
            raise RuntimeError(f"a step has more than {self.shards} shards of {self.each} micro-batches")
        node, within = divmod(self._passed, self.shards * self.each // self.nodes)
        if within or node == self.nodes:
            return
        complete = (node & -node).bit_length() - 1  # levels that this node completes
        gradients = list(self._gradients())
        for gradient in gradients:
            levels = self._levels.setdefault(gradient, [])
            while len(levels) <= complete:  # also of a buffer that the nodes before had nothing for
                levels.append(torch.zeros_like(gradient))
        with _beside_the_forward_pass(gradients[0].device):
            for gradient in gradients:
                _put_away(gradient, self._levels[gradient][: complete + 1])

    @torch.no_grad()
    def finish(self, gradient: Tensor, part: slice = slice(None)) -> None:
        """Add to the last node's gradient what the levels hold. part: of the flat gradient. Call it once for each.

        The last backward pass may still run, if it has completed this part.
        """
        for level in self._levels.get(gradient, []):
            gradient.view(-1)[part].add_(level.view(-1)[part])

    def restart(self) -> None:
        """Begin the next step. Raises RuntimeError if this one lacked micro-batches."""
        if self.shards > 1 and self._passed != self.shards * self.each:
            raise RuntimeError(f"a step had {self._passed} micro-batches, not {self.shards} shards of {self.each}")
        self._passed = 0


@torch.no_grad()
def _put_away(gradient: Tensor, levels: list[Tensor]) -> None:
    """Add the full levels to the gradient, lowest first; the last level, empty, gets the sum. Zero the gradient."""
    *full, empty = levels
    if full:
        for level in full[:-1]:
            gradient.add_(level)
        torch.add(gradient, full[-1], out=empty)
    else:
        empty.copy_(gradient)
    gradient.zero_()


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
