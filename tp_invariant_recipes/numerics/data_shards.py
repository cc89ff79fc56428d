"""Gradients of D virtual data shards on one data-parallel rank: a tree, whatever the number of ranks.

A step's gradient is a tree over D shards, neighbours first. Each shard is the sum of its sequences' gradients, one
after the other. A rank has D/dp consecutive shards, a subtree; it computes them in turn, and adds them as a binary
counter counts, so that it keeps log2(D/dp) sums beside the one that grows:

    shard    0         1              2         3
    level 0  0         –              2         –
    level 1  –         0+1            0+1       –
    result                                      (0+1) + (2+3)
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class ShardCounter:
    """Adds up the shards of a rank. Without `shards` > 1 it does nothing and keeps nothing.

    shards:    of this rank, D/dp, a power of two.
    each:      how many micro-batches a shard has.
    gradients: the buffers that the backward passes add to, fp32 of any shape. It is called at the end of a shard,
               since some appear with the first backward pass only.
    """

    def __init__(self, shards: int, each: int, gradients: Callable[[], Iterable[Tensor]]) -> None:
        self.shards, self.each, self._gradients = shards, each, gradients
        self._passed = 0  # micro-batches
        self._stored = 0  # shards that the levels hold, as bits
        self._levels: dict[Tensor, list[Tensor]] = {}

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        """To be called when a backward pass is complete. Raises RuntimeError if there are more than planned."""
        self._passed += 1
        if self._passed > self.shards * self.each:
            raise RuntimeError(f"a step has more than {self.shards} shards of {self.each} micro-batches")
        if self._passed % self.each or self._passed == self.shards * self.each:
            return
        for gradient in self._gradients():
            levels = self._levels.setdefault(gradient, [])
            level = 0
            while self._stored >> level & 1:
                if level == len(levels):  # a buffer that the shards before had nothing for
                    levels.append(torch.zeros_like(gradient))
                gradient.add_(levels[level])
                level += 1
            if level == len(levels):
                levels.append(torch.empty_like(gradient))
            levels[level].copy_(gradient)
            gradient.zero_()
        self._stored += 1

    @torch.no_grad()
    def finish(self, gradient: Tensor, part: slice = slice(None)) -> None:
        """Add to the last shard's gradient what the levels hold. part: of the flat gradient. Call it once for each.

        The last backward pass may still run, if it has completed this part.
        """
        for level in self._levels.get(gradient, []):
            gradient.view(-1)[part].add_(level.view(-1)[part])

    def restart(self) -> None:
        """Begin the next step. Raises RuntimeError if this one lacked micro-batches."""
        if self.shards > 1 and self._stored != self.shards - 1:
            raise RuntimeError(f"a step had {self._stored + 1} complete shards instead of {self.shards}")
        self._passed = self._stored = 0
