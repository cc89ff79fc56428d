"""Context shards: how the tokens of a sequence are cut for context parallelism, whatever cp is.

A sequence is 2C chunks; context shard c of C has the chunks c and 2C-1-c, so that causal attention costs every shard
the same. Tokens lie shard by shard, and a rank holds C/cp consecutive shards, which is the cut of Megatron at cp = C:

    C = 2, cp = 1    rank 0  [ chunk 0, chunk 3 | chunk 1, chunk 2 ]
    C = 2, cp = 2    rank 0  [ chunk 0, chunk 3 ]     rank 1  [ chunk 1, chunk 2 ]

So cp decides only which rank computes which shards. What sums over tokens is a tree over C shards, of which a rank has
a subtree; what is computed token by token is computed on the tokens of one shard, a shape that no cp changes.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


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
