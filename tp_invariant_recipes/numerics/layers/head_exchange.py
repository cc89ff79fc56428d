"""All-to-all of heads: for attention a rank of a context-parallel group gets all tokens of some of its heads.

Attention is not computed token by token, but it is head by head. Each rank of the group has other tokens of the same
heads; after the exchange it has all tokens, in the order of the sequence, of its part of the heads:

    [s/cp, b, heads, d], tokens shard by shard   →   [s, b, heads/cp, d], tokens by position

It only moves bytes. With cp = 1 it only puts the tokens in order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.numerics.sums import context_shards


@dataclass(frozen=True)
class HeadExchange:
    """shards: C. cp: ranks that share sequences. group: their process group; None when cp is 1."""

    shards: int
    cp: int = 1
    group: Any = None

    def to_heads(self, x: Tensor) -> Tensor:
        """[s/cp, b, heads, d] → [s, b, heads/cp, d]; cp divides heads."""
        return x if self.shards == 1 else _Exchanged.apply(x, self, _heads, _tokens)

    def to_tokens(self, x: Tensor, heads: int) -> Tensor:
        """[s, b, heads/cp · d] → [s/cp, b, heads · d]. heads: of a rank before the exchange."""
        if self.shards == 1:
            return x
        return _Exchanged.apply(x.unflatten(2, (heads // self.cp, -1)), self, _tokens, _heads).flatten(2)


Move = Callable[[Tensor, HeadExchange], Tensor]


class _Exchanged(LayerFunction):
    """One of `_heads` and `_tokens`, whose gradient the other exchanges."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: HeadExchange, there: Move, back: Move) -> Tensor:
        ctx.exchange, ctx.back = exchange, back
        return there(x, exchange)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradients[0], ctx.exchange), None, None, None


def _heads(x: Tensor, exchange: HeadExchange) -> Tensor:
    tokens, batch, heads, width = x.shape
    leaving = x.reshape(tokens, batch, exchange.cp, heads // exchange.cp, width)
    arrived = _moved(leaving.permute(2, 0, 1, 3, 4), exchange).flatten(0, 1)
    return arrived[_places(arrived.shape[0], exchange.shards, arrived.device)]


def _tokens(x: Tensor, exchange: HeadExchange) -> Tensor:
    held = x[context_shards.positions(x.shape[0], exchange.shards, device=x.device)]
    arrived = _moved(held.unflatten(0, (exchange.cp, -1)), exchange)
    return arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _moved(parts: Tensor, exchange: HeadExchange) -> Tensor:
    """[cp, …], part r for rank r → [cp, …], part r of rank r."""
    if exchange.group is None:
        return parts
    parts = parts.contiguous()
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=exchange.group)
    return arrived


@cache
def _places(length: int, shards: int, device: torch.device) -> Tensor:
    """Return where each position of the sequence is held."""
    return context_shards.positions(length, shards).argsort().to(device)
