# SPDX-License-Identifier: Apache-2.0
"""A forward pass of some rows of many sequences, whose earlier keys are in a cache: what the layers of portable read.

The layers are those of training. While a pass is current, rotary positions are those of its rows, and attention writes
the rows' keys to the cache and reads the others there. Everything else is row by row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from tp_invariant_recipes.portable.ieee import rotary as ieee_rotary
from tp_invariant_recipes.portable.ieee.cached_attention import Spans, cached_attention, store_keys


@dataclass(frozen=True)
class CachedPass:
    """A pass of R rows.

    spans:   which rows attend to which keys. slots: [R] int64, where each row's key and value go.
    keys, values: [layers, slots, groups/t, d] bf16, the cache.
    longest: positions that rotary tables need, the same in all passes that share a CUDA graph.
    """

    spans: Spans
    slots: Tensor
    keys: Tensor
    values: Tensor
    longest: int
    _turns: dict[tuple, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def turns(self, dim: int, base: float, factor: float | None) -> tuple[Tensor, Tensor]:
        """cos and sin of the rows' positions, [R, dim / 2] fp32: as of `ieee_rotary.tables`, once a pass."""
        kind = dim, base, factor
        if kind not in self._turns:
            tables = ieee_rotary.tables(self.longest, *kind, str(self.slots.device))
            cos, sin = (table.index_select(0, self.spans.positions) for table in tables)
            self._turns[kind] = cos, sin
        return self._turns[kind]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of a layer's rows: [R, 1, h/t, d] and two of [R, 1, groups/t, d] → [R, 1, h/t · d].

        layer: its number, from 1 on.
        """
        keys, values = self.keys[layer - 1], self.values[layer - 1]
        store_keys(key.squeeze(1), value.squeeze(1), keys, values, self.slots)
        return cached_attention(query.squeeze(1), keys, values, self.spans, scale).view(len(query), 1, -1)


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
