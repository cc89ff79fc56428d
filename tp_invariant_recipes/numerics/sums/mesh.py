# SPDX-License-Identifier: Apache-2.0
"""The virtual mesh: V shards in a fixed order, spread over t ranks. Each rank owns consecutive shards."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class VirtualMesh:
    """V virtual shards on t ranks. Rank r owns V/t shards, starting at shard r * V/t.

    shards: V, a power of two. size: t, a divisor of V. rank: this rank's place in 0..t-1.
    group:  the ranks' torch.distributed process group; None when t is 1.
    contexts: C/cp, the context shards whose tokens the ranks hold, one after the other
              (numerics/sums/data_shards.py).
    graphs:   whether launches become part of CUDA graphs, so that they cost the host nothing later.
    """

    shards: int
    size: int
    rank: int
    group: Any = None
    contexts: int = 1
    graphs: bool = False

    def __post_init__(self) -> None:
        if self.shards < 1 or self.shards & (self.shards - 1):
            raise ValueError(f"the number of virtual shards must be a power of two, not {self.shards}")
        if self.size < 1 or self.shards % self.size:
            raise ValueError(f"{self.size} ranks do not divide {self.shards} virtual shards")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not one of {self.size}")

    @classmethod
    def from_group(cls, shards: int, group: Any, contexts: int = 1, *, graphs: bool = False) -> "VirtualMesh":
        """Return the mesh of a tensor-parallel process group."""
        size = group.size()
        return cls(shards, size, group.rank(), group if size > 1 else None, contexts, graphs)

    @cached_property
    def local(self) -> int:
        """The number of shards of one rank, V/t."""
        return self.shards // self.size

    @cached_property
    def chunks(self) -> int:
        """Chunks of the tokens that the ranks hold together: V of each context shard."""
        return self.shards * self.contexts

    @cached_property
    def local_chunks(self) -> int:
        """Those of one rank's slice of the tokens."""
        return self.local * self.contexts
