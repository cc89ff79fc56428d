# SPDX-License-Identifier: Apache-2.0
"""The rank that computes each expert. In each layout one rank gets all tokens of an expert."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.numerics.sums.expert_groups import ExpertGroups

if TYPE_CHECKING:
    from torch import Tensor  # the configuration's rules use this module without torch


def fits(experts: int, tp: int, ep: int) -> bool:
    """Whether each expert can have one owner: tp divides ep or ep divides tp, and both divide the number of experts."""
    return max(tp, ep) % min(tp, ep) == 0 and experts % max(tp, ep) == 0


@dataclass(frozen=True)
class ExpertHosts:
    """The ranks that share tokens, in the order of the tokens, and the experts that each computes.

    Ranks of one tensor-parallel group hold slices of the same sequences. With ep < tp several of them hold an expert's
    weights; only one, the owner, computes with them, so that it sees the expert's tokens of the whole micro-batch. The
    others have zeros for its weight gradient, so Megatron's sum over expert-data-parallel ranks does not change it.
    With ep > tp an owner also gets tokens of other context-parallel or data-parallel ranks. The tokens of each context
    shard of each data-parallel rank are one of its sources.

    experts: E, of the layer. size: ranks that share tokens, max(tp, ep). ep: ranks that share the layer's weights.
    rank:    this rank's place in `group`, which is None when size is 1.
    sources: parts of the tokens that an owner gets: context shards, of one data-parallel rank after the other.
    parts:   context shards, whole or in part, that the tokens of one rank belong to, an equal number to each.
    chain:   sources whose gradients are added one after the other, as of `Batches`.
    """

    experts: int
    size: int
    ep: int
    rank: int = 0
    sources: int = 1
    group: Any = None
    parts: int = 1
    chain: tuple[int, ...] = (0,)

    @classmethod
    def from_config(cls, config: Any, tp: Any, ep: Any) -> "ExpertHosts":
        """ExpertHosts by Megatron's tensor-parallel and expert-parallel process groups; expert tensor parallelism is 1.

        config: a TransformerConfig.
        """
        from megatron.core import parallel_state

        experts, size = config.num_moe_experts, max(tp.size(), ep.size())
        if not fits(experts, tp.size(), ep.size()):
            raise ConfigError(f"tp={tp.size()} and ep={ep.size()}: one must divide the other, both {experts} experts")
        group = tp if tp.size() >= ep.size() else ep
        sums = ExpertGroups.of_ranks(config, parallel_state.get_data_parallel_world_size())
        contexts = sums.contexts // sums.cp
        sources, parts = size // tp.size() * contexts, max(1, contexts // tp.size())
        return cls(experts, size, ep.size(), group.rank(), sources, group if size > 1 else None, parts, sums.chain)

    @property
    def each(self) -> int:
        """The number of experts that one rank computes."""
        return self.experts // self.size

    @property
    def first_local(self) -> int:
        """The first expert that this rank computes, as an index into the experts whose weights it holds."""
        return self.rank // self.ep * self.each

    def by_owner(self, x: "Tensor") -> "Tensor":
        """[E, …] in order of experts → [E, …] in order of owners, each owner's experts in order."""
        return x.view(self.ep, -1, self.each, *x.shape[1:]).transpose(0, 1).flatten(0, 2)

    def by_number(self, x: "Tensor") -> "Tensor":
        """Return the inverse of `by_owner`."""
        return x.view(-1, self.ep, self.each, *x.shape[1:]).transpose(0, 1).flatten(0, 2)

    def in_order(self, x: "Tensor") -> "Tensor":
        """[size, …] in order of owners → [size, …] in order of the experts that they own, contiguous."""
        return x.view(-1, self.ep, *x.shape[1:]).transpose(0, 1).flatten(0, 1).contiguous()
