# SPDX-License-Identifier: Apache-2.0
"""Common base of Megatron-Core's two core attentions with the definition of numerics/layers/attention.py."""

import copy
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.kernels.row_sums import token_sum
from tp_invariant_recipes.numerics.layers.attention import Core, HeadExchange, attention, attention_of_each
from tp_invariant_recipes.numerics.megatron.base import OnMesh
from tp_invariant_recipes.numerics.sums import data_shards
from tp_invariant_recipes.numerics.sums.tree import tree_sums


def rank_batch(original: Callable[..., Any], shards: int) -> Callable[..., Any]:
    """Return a replacement for the get_batch_on_this_cp_rank of Bridge's forward step. shards: C."""

    def get_batch_on_this_cp_rank(batch: dict[str, Any], is_hybrid_cp: bool, cp_group: Any) -> dict[str, Any]:
        if is_hybrid_cp or batch.get("cu_seqlens") is not None or batch.get("attention_mask") is not None:
            raise NotImplementedError("packed sequences and masks have no invariant version with context shards")
        return {
            name: value if value is None else value.index_select(1, _held(value.shape[1], shards, cp_group, value))
            for name, value in batch.items()
        }

    return get_batch_on_this_cp_rank


def rank_rotary(original: Callable[..., Any], shards: int) -> Callable[..., Any]:
    """Return a replacement for RotaryEmbedding.forward."""

    @lru_cache(maxsize=32)
    def forward(self: Any, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        if packed_seq:
            raise NotImplementedError("packed sequences have no invariant version with context shards")
        whole = self.get_emb(max_seq_len, offset)
        return whole[_held(max_seq_len, shards, self.cp_group if cp_group is None else cp_group, whole)]

    return forward


def rank_loss(original: Callable[..., Any], shards: int) -> Callable[..., Any]:
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
    return data_shards.positions(length, shards, size, rank, like.device)


# What selects a backend, or an algorithm of one, beside its operands and the module's own settings.
FIELDS = (
    "attention_backend", "attention_softmax_in_fp32", "masked_softmax_fusion", "deterministic_mode", "softmax_type",
)  # fmt: skip
VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
# Fields that give attention another result than its context, or another softmax.
OFF = ("qk_clip", "log_max_attention_logit")
LEARNABLE = "learnable"  # each head has a sink, a parameter
SOFTMAXES = ("vanilla", LEARNABLE)
SINKS = "softmax_offset"  # attribute of both classes

Mask = tuple[Tensor | None, Any]  # Megatron's attention_mask and attn_mask_type


class CoreAttention(OnMesh, Core):
    """Forward of a core attention, which has config and a group. Queries, keys and values have no sums across ranks.

    by_sequence: whether each sequence of a micro-batch has the bits that it has alone; without gradients.
    """

    tensor_model_parallel, partition_dim = True, 0  # of its attention sinks
    training: bool
    by_sequence = False

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        wrong = [f"model.{name}" for name in OFF if getattr(config, name, False)]
        if config.softmax_type not in SOFTMAXES:
            wrong.append(f"model.softmax_type={config.softmax_type}")
        if wrong:
            raise ConfigError(f"{', '.join(wrong)}: attention has no invariant version with it; leave it unset")
        self.exchange = _exchange(config)
        if self.exchange.cp > 1:  # a launch has whole sequences, of some of the heads
            config = copy.copy(config)
            config.context_parallel_size = config.context_shards = 1
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        for weight in self._sinks():  # Megatron leaves it unmarked, and the gradient norm would lack other ranks' heads
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1  # type: ignore[attr-defined]

    def _sinks(self) -> tuple[Tensor, ...]:
        """Return the sinks of this rank's heads, if there are any."""
        return (getattr(self, SINKS),) if self.config.softmax_type == LEARNABLE else ()

    @contextmanager
    def with_sinks(self, sinks: Tensor | None) -> Iterator[None]:
        """For a launch of some heads: their sinks stand before the parameter."""
        if sinks is None:
            yield
            return
        self.__dict__[SINKS] = sinks
        try:
            yield
        finally:
            del self.__dict__[SINKS]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[s/cp, b, heads/t, d], [s/cp, b, groups/t, d] and [s/cp, b, groups/t, v] → [s/cp, b, heads/t · v]."""
        if attention_bias is not None or packed_seq_params is not None:
            raise NotImplementedError("attention with a bias or packed sequences has no invariant version")
        if attention_mask is not None and attention_mask.ndim == 4 and attention_mask.shape[1] != 1:
            raise NotImplementedError("attention with a mask for every head has no invariant version")
        if attention_mask is not None and self.exchange.shards > 1:
            raise NotImplementedError("attention with a mask of its own has no invariant version with context shards")
        heads, shards = query.shape[2], self.mesh.local // self.exchange.cp
        query, key, value = map(self.exchange.to_heads, (query, key, value))
        form = attention_of_each if self.by_sequence and query.shape[1] > 1 else attention
        out = form(self, query, key, value, (attention_mask, attn_mask_type), shards, *self._sinks())
        return self.exchange.to_tokens(out, heads)

    def kind(self, mask: Mask) -> tuple[Any, ...]:
        """All that tells launches on operands of one shape and dtype apart."""
        tensor, mask_type = mask
        return self._fixed, mask_type, tensor is None or tensor.shape, self.training

    @cached_property
    def _fixed(self) -> tuple[Any, ...]:
        fields = (str(getattr(self.config, name, None)) for name in FIELDS)
        return (type(self).__name__, *self.settings(), *fields, *map(os.environ.get, VARIABLES))

    def selected(self, length: int, batch: int) -> str:
        """Return the backend for the heads of one shard, which are the same in every layout, by launching it.

        length, batch: positions and samples of a micro-batch.
        """
        config, shards = self.config, self.mesh.shards
        heads, groups = config.num_attention_heads // shards, config.num_query_groups // shards
        device = torch.cuda.current_device()
        keys = values = config.kv_channels
        if config.multi_latent_attention:
            keys, values = config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
        query, key, value = (
            torch.zeros(length, batch, count, width, dtype=config.params_dtype, device=device)
            for count, width in ((heads, keys), (groups, keys), (groups, values))
        )
        with torch.no_grad():
            self.launch(query, key, value, (None, AttnMaskType.causal), *(sink[:heads] for sink in self._sinks()))
        return self.backend()

    @abstractmethod
    def settings(self) -> tuple[Any, ...]:
        """Get what the module itself has settled when it was built: the factor of the scores, the window and so on."""


def _exchange(config: Any) -> HeadExchange:
    shards, cp = getattr(config, "context_shards", config.context_parallel_size), config.context_parallel_size
    if cp == 1:
        return HeadExchange(shards)
    from megatron.core.parallel_state import get_context_parallel_group

    return HeadExchange(shards, cp, get_context_parallel_group())


def backend_in_force(model: Iterable[torch.nn.Module], length: int, batch: int) -> str | None:
    """Return what the invariant attention layers of this rank run, all alike; None: it has none.

    model: chunks. length, batch: positions and samples of a micro-batch.
    """
    layers = (layer for chunk in model for layer in chunk.modules() if isinstance(layer, CoreAttention))
    first = next(layers, None)
    return None if first is None else first.selected(length, batch)
