"""Megatron's local attention over context-parallel ranks, which Megatron has in Transformer Engine alone.

Each rank gathers queries, keys and values, computes the whole sequence and keeps its own rows:

    rank r of cp:  [own 2·s/cp rows: chunks r and 2cp-1-r] -> gather -> [s rows in order] -> attention -> its own rows

The gradient of what was gathered is summed over the ranks. It is slow, and as right as one rank's attention.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.replacement import Replacement

_ATTENTION = "megatron.core.transformer.dot_product_attention:DotProductAttention"


def _built_for_single_rank(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, config: Any, *args: Any, **more: Any) -> None:
        if not _stock(config):
            return original(self, config, *args, **more)
        shards, config.context_parallel_size = config.context_parallel_size, 1
        try:
            original(self, config, *args, **more)
        finally:
            config.context_parallel_size = shards

    return __init__


def _over_all_ranks(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **more: Any) -> Tensor:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        group = parallel_state.get_context_parallel_group()
        if group.size() == 1 or not _stock(self.config):
            return original(self, query, key, value, mask, *args, **more)
        own = rows(len(query) * group.size(), group.size())
        order = torch.cat(own).argsort()
        whole = (gather_from_sequence_parallel_region(x, group=group)[order] for x in (query, key, value))
        return original(self, *whole, None, *args, **more)[own[group.rank()]]  # a causal mask is the default

    return forward


def _stock(config: Any) -> bool:
    """Whether a model has Megatron's numerics: the invariant attention gathers keys by itself."""
    return getattr(config, "invariant_mode", None) is None


def rows(length: int, shards: int) -> list[Tensor]:
    """Each context-parallel rank's positions, int64 [length/shards]: one chunk from the front, one from the back."""
    chunks = torch.arange(length).chunk(2 * shards)
    return [torch.cat((chunks[rank], chunks[-1 - rank])) for rank in range(shards)]


_WHY = "stock context parallelism is otherwise Transformer Engine's, and no audit on a CPU would see its losses"
REPLACEMENTS = (
    Replacement(f"{_ATTENTION}.__init__", _built_for_single_rank, _WHY),
    Replacement(f"{_ATTENTION}.forward", _over_all_ranks, _WHY),
)
