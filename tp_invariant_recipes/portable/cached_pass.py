# SPDX-License-Identifier: Apache-2.0
"""A forward pass of some rows of many sequences, whose earlier keys are in a cache: what the layers of portable read.

The layers are those of training. While a pass is current, rotary positions are those of its rows, and attention writes
the rows' keys to the cache and reads the others there. A gated delta net goes on from a sequence's state, and from the
last tokens that its convolution reads. Everything else is row by row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tp_invariant_recipes.portable.ieee import rotary as ieee_rotary
from tp_invariant_recipes.portable.ieee.cached_attention import Spans, cached_attention, store_keys
from tp_invariant_recipes.portable.ieee.delta_rule import Numbers, delta_rule


class Recurrent(NamedTuple):
    """What a pass reads and writes of gated delta nets.

    spans:  as of `delta_rule`. rows: [R, 2] int64, of each row its state and its number in the span.
    states: [nets, slots, heads/t, value, key] fp32. tails: [nets, slots, TAPS - 1, c/t] bf16, a sequence's last tokens.
    """

    spans: Tensor
    rows: Tensor
    states: Tensor
    tails: Tensor


@dataclass(frozen=True)
class CachedPass:
    """A pass of R rows.

    spans:   which rows attend to which keys. slots: [R] int64, where each row's key and value go.
    keys, values: [layers of attention, slots, groups/t, d] bf16, the cache.
    longest: positions that rotary tables need, the same in all passes that share a CUDA graph.
    places:  of each layer of the model: its place among its kind. recurrent: None: no layer is a gated delta net.
    """

    spans: Spans
    slots: Tensor
    keys: Tensor
    values: Tensor
    longest: int
    places: Sequence[int]
    recurrent: Recurrent | None = None
    _turns: dict[tuple, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def turns(self, dim: int, base: float, scaling: float | ieee_rotary.Yarn | None) -> tuple[Tensor, Tensor]:
        """cos and sin of the rows' positions, [R, dim / 2] fp32: as of `ieee_rotary.tables`, once a pass."""
        kind = dim, base, scaling
        if kind not in self._turns:
            tables = ieee_rotary.tables(self.longest, *kind, str(self.slots.device))
            cos, sin = (table.index_select(0, self.spans.positions) for table in tables)
            self._turns[kind] = cos, sin
        return self._turns[kind]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of a layer's rows: [R, 1, h/t, d] and two of [R, 1, groups/t, d] → [R, 1, h/t · d].

        layer: its number, from 1 on.
        """
        keys, values = (cache[self.places[layer - 1]] for cache in (self.keys, self.values))
        store_keys(key.squeeze(1), value.squeeze(1), keys, values, self.slots)
        return cached_attention(query.squeeze(1), keys, values, self.spans, scale).view(len(query), 1, -1)

    def past(self, layer: int, x: Tensor) -> list[Tensor]:
        """Return what each weight of a convolution multiplies: the tokens before each row, then x. [R, c] fp32 each.

        x: [R, c] bf16. layer: its number, from 1 on. The last tokens of each span stay for the next pass.
        """
        assert self.recurrent is not None
        spans, rows, _, tails = self.recurrent
        held, (slot, number) = tails[self.places[layer - 1]], rows.unbind(1)
        lags, row = held.shape[1], torch.arange(len(x), device=x.device)
        taps = []
        for lag in range(lags, 0, -1):
            before = held[slot, (lags + number - lag).clamp(max=lags - 1)]
            tokens = torch.where((number >= lag).unsqueeze(1), x[(row - lag).clamp(min=0)], before)
            taps.append(torch.where((self.spans.positions >= lag).unsqueeze(1), tokens.float(), 0.0))
        first, count, slots = (column.long() for column in spans[:, :3].unbind(1))
        at = count.unsqueeze(1) + torch.arange(-lags, 0, device=x.device)
        before = held[slots.unsqueeze(1), (lags + at).clamp(0, lags - 1)]
        now = x[(first.unsqueeze(1) + at).clamp(min=0)]
        held[slots] = torch.where((at >= 0).unsqueeze(2), now, before)
        return [*taps, x.float()]

    def walk(self, layer: int, numbers: Numbers) -> Tensor:
        """Return the gated delta rule of the rows, [R, heads/t, value] fp32. layer: its number, from 1 on."""
        assert self.recurrent is not None
        return delta_rule(numbers, self.recurrent.spans, 1, self.recurrent.states[self.places[layer - 1]])


_current: list[CachedPass | None] = [None]


def current() -> CachedPass | None:
    """Return the pass that runs; None: whole sequences are computed."""
    return _current[0]


@contextmanager
def cached(now: CachedPass) -> Iterator[None]:
    """Make the forward passes in the block this one."""
    _current[0] = now
    try:
        yield
    finally:
        _current[0] = None
