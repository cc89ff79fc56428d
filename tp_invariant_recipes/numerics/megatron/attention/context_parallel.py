"""What a run does otherwise with context shards (numerics/sums/context_shards.py): the tokens that a rank has of a
sequence, their rotary positions, and their loss.

Megatron divides the loss of a rank's tokens by their number, so that tokens count by the rank that has them. Here the
tokens of all context-parallel ranks are counted together: the loss does not depend on how a sequence is cut.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.kernels.token_sum import token_sum
from tp_invariant_recipes.numerics.sums import context_shards
from tp_invariant_recipes.numerics.sums.tree import tree_sums


def batch_of_a_rank(original: Callable[..., Any], shards: int) -> Callable[..., Any]:
    """Return a replacement for the get_batch_on_this_cp_rank of Bridge's forward step. shards: C."""

    def get_batch_on_this_cp_rank(batch: dict[str, Any], is_hybrid_cp: bool, cp_group: Any) -> dict[str, Any]:
        if is_hybrid_cp or batch.get("cu_seqlens") is not None or batch.get("attention_mask") is not None:
            raise NotImplementedError("packed sequences and masks have no invariant version with context shards")
        return {
            name: value if value is None else value.index_select(1, _held(value.shape[1], shards, cp_group, value))
            for name, value in batch.items()
        }

    return get_batch_on_this_cp_rank


def rotary_of_a_rank(original: Callable[..., Any], shards: int) -> Callable[..., Any]:
    """Return a replacement for RotaryEmbedding.forward."""

    @lru_cache(maxsize=32)
    def forward(self: Any, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        if packed_seq:
            raise NotImplementedError("packed sequences have no invariant version with context shards")
        whole = self.get_emb(max_seq_len, offset)
        return whole[_held(max_seq_len, shards, self.cp_group if cp_group is None else cp_group, whole)]

    return forward


def loss_of_a_rank(original: Callable[..., Any], shards: int) -> Callable[..., Any]:
    """Return a replacement for Bridge's masked_next_token_loss, made from that function, which checks the loss.

    Its tokens are those of all ranks of a sequence. What is logged is [C/cp · 2] fp32, of each context shard the sum of
    losses and the tokens.
    """

    def masked_next_token_loss(loss_mask: Tensor, output_tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        from megatron.core import parallel_state

        loss, tokens, _ = original(loss_mask, output_tensor, *args, **kwargs)
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            dist.all_reduce(tokens, group=group)
        losses = output_tensor.detach().float()
        mask = loss_mask.float()
        n = shards // group.size()
        pairs = torch.stack((losses * mask, mask), -1).transpose(0, 1).flatten(0, 1)
        sums = tree_sums(token_sum(pairs, n))  # [n, 2] fp32: losses and tokens of each context shard
        return loss, tokens, {"lm loss": sums.view(-1)}

    return masked_next_token_loss


def _held(length: int, shards: int, group: Any, like: Tensor) -> Tensor:
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    return context_shards.positions(length, shards, size, rank, like.device)
