# SPDX-License-Identifier: Apache-2.0
"""Dispatch tokens to the experts' owners and back. The exchange only moves bytes; the only sums join a token's top-k
assignments.

On a rank, a copy of a token for an expert is a *slot*. Slots are sorted by owner, then expert, then token. An owner
receives the slots of all ranks in rank order, which is the order of the sequence, and sorts them by expert. So in every
layout it has the same tokens of an expert, from the whole micro-batch, in the same order.

A CUDA graph cannot wait for the numbers of slots: there each rank has equally many for every other, as many as any
choice needs or as its `Room` says, and the last of them are empty. So are the last rows of an owner. An empty one has
the numbers of some token, or none; no sum and no GEMM reads it.

The sums over a token's top-k assignments, forward and backward, are in the order of the experts' numbers.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import get_capacity
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups
from tp_invariant_recipes.kernels.row_sums import row_sum
from tp_invariant_recipes.numerics.gemm.cublas import capturing
from tp_invariant_recipes.numerics.layers.experts.expert_placement import ExpertHosts
from tp_invariant_recipes.numerics.sums.data_shards import of_a_rank
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh


@dataclass(frozen=True)
class Batches:
    """The tokens that this rank computes with, one batch for each of its experts and each source.

    groups: tokens of each batch, by expert, then by source. first: the first expert's local number.
    chain:  the sources of one buffer of gradients in the order in which they are added there; the next buffer has the
            next sources (numerics/sums/expert_groups.py).
    """

    groups: Groups
    first: int
    sources: int
    chain: tuple[int, ...] = (0,)

    @property
    def buffers(self) -> int:
        """Buffers of an expert's gradient."""
        return self.sources // len(self.chain)

    @property
    def experts(self) -> range:
        """The local numbers of the experts."""
        return range(self.first, self.first + len(self.groups.counts) // self.sources)

    def in_order[T](self, outs: Sequence[T]) -> Iterator[tuple[T, int]]:
        """Each batch with what it is added to, in order. outs: one for each expert and buffer."""
        for number, out in enumerate(outs):
            for source in self.chain:
                yield out, number * len(self.chain) + source

    def expert(self, batch: int) -> int:
        """Return the local number of a batch's expert."""
        return self.first + batch // self.sources

    def source(self, batch: int) -> int:
        """Return the part of the tokens that a batch comes from: context shards, of one data-parallel rank after the
        other.
        """
        return batch % self.sources


@dataclass(frozen=True)
class Route:
    """The routes of one layer and micro-batch. This rank has n tokens and m slots and receives r rows; E experts.

    map:      [n, E] bool, the experts of each token; slot: [n, E] int64, the slot of its copy where map is true.
    copies:   [n, topk] int64, a token's slots by expert, -1 for none.
    token:    [m] int64, the token of each slot; place: [m] int64, its index in the flattened map; any of an empty one.
    send:     number of slots for each rank; receive: number of rows from each; empty if this rank is alone.
    sorted:   [r] int64, the received rows in the order of the batches; arrived: [r], the inverse.
    """

    map: Tensor
    slot: Tensor
    copies: Tensor
    token: Tensor
    place: Tensor
    send: list[int]
    receive: list[int]
    sorted: Tensor | None
    arrived: Tensor | None
    batches: Batches


MARGIN = 1.25  # a graph's slots over those that were filled before its capture


@dataclass
class Room:
    """How many slots a layer has for each rank in a graph of a training step (numerics/megatron/graph_room.py).

    lacking: [] int32, not 0 after a replay whose tokens needed more, so that its results are void.
    most:    slots that a rank filled for another in the steps outside of the graph, at most.
    """

    lacking: Tensor
    most: int = 0

    def limited(self, most: int, filled: Tensor) -> int:
        """Return the slots for each rank, at most `most`. filled: [from, to], as this replay needs them."""
        slots = math.ceil(self.most * MARGIN)
        if not 0 < slots < most:
            return most
        self.lacking.logical_or_((filled > slots).any())
        return slots


@torch.no_grad()
def route(
    routing_map: Tensor, topk: int, owners: ExpertHosts, capacity: int | None = None, room: Room | None = None
) -> Route:
    """Plan the routes of a micro-batch. It costs one collective of counts and, outside of a CUDA graph, one wait.

    routing_map: [n, E] bool, topk experts of each token at most. capacity: tokens that an expert takes of a rank's.
    room:        fewer slots in a CUDA graph than any choice needs; None: as many.
    """
    n, experts = routing_map.shape
    by_owner = owners.by_owner(routing_map.t())
    counts = by_owner.view(experts, owners.parts, -1).sum(2)
    everyone = counts
    if owners.group is not None:
        everyone = counts.new_empty(owners.size * counts.numel())
        dist.all_gather_into_tensor(everyone, counts.view(-1), group=owners.group)
    everyone = everyone.view(owners.size, owners.size, owners.each, owners.parts)
    captured = capturing(routing_map)  # a graph's replays have other numbers of slots
    known: list[list[list[list[int]]]] = [] if captured else everyone.tolist()  # [from][to][expert][part]
    slots = [[sum(map(sum, to)) for to in row] for row in known]  # [from][to]
    if captured:
        most = min(n * min(topk, owners.each), owners.each * (n if capacity is None else capacity))
        most = most if room is None else room.limited(most, everyone.sum((2, 3)))
        slots = [[most] * owners.size] * owners.size
    elif room is not None:
        room.most = max(room.most, *map(max, slots))

    at, slot = _slots(by_owner, slots[owners.rank], captured)
    number = owners.by_owner(torch.arange(experts, device=at.device))
    token, place = at % n, at % n * experts + number[at // n]
    slot = owners.by_number(slot.view(experts, n)).t().contiguous()
    nth = routing_map.cumsum(1)
    expert = torch.searchsorted(nth, _first(topk, nth).expand(n, topk).contiguous())  # E: a token with fewer
    copies = slot.gather(1, expert.clamp(max=experts - 1)).where(expert < experts, -1)

    mine = everyone[:, owners.rank]  # [from, expert, part]
    per_source = mine.transpose(0, 1).reshape(owners.each, owners.sources, -1).sum(2).flatten()
    total = sum(row[owners.rank] for row in slots)
    groups = Groups(_sizes(known, owners), per_source, total * captured)
    batches = Batches(groups, owners.first_local, owners.sources, owners.chain)
    send, receive = [], []
    arriving = arrived = None
    if owners.group is not None:
        send, receive = slots[owners.rank], [row[owners.rank] for row in slots]
        rows = _with_empty(mine.sum(2), most) if captured else mine.sum(2)
        arriving, arrived = _regrouped(rows, total), _regrouped(rows.t(), total)
    return Route(routing_map, slot, copies, token, place, send, receive, arriving, arrived, batches)


def _slots(by_owner: Tensor, sizes: list[int], captured: bool) -> tuple[Tensor, Tensor]:
    """Get the entry of each slot, [m] int64, and the slot of each entry, [E · n] int64.

    by_owner: [E, n] bool, whose entries are numbered row by row. sizes: slots for each rank; in a CUDA graph the last
    of them are empty: they have any entry.
    A binary search over cumulative counts finds the entries. torch's deterministic scatter would sort, and would add
    all entries without a destination at one index, one after the other.
    """
    before = by_owner.flatten().cumsum(0)
    nth = _first(sum(sizes), before)
    if not captured:
        return torch.searchsorted(before, nth), before - 1
    ends = before.view(len(sizes), -1)[:, -1:]
    shift = torch.arange(len(sizes), device=ends.device).unsqueeze(1) * sizes[0] - ends.roll(1, 0)
    shift[0] = 0
    at = torch.searchsorted(before, (nth.view(len(sizes), -1) - shift).flatten())
    slot = (before - 1).view(len(sizes), -1) + shift
    # Of NaN a router may choose more experts.
    return at.clamp(max=len(before) - 1), slot.flatten().clamp(max=len(nth) - 1)


def _with_empty(counts: Tensor, most: int) -> Tensor:
    """Add the empty rows as an expert after the last. counts: [from, expert]; most: rows from each rank."""
    ends = counts.cumsum(1).clamp(max=most)
    ends = torch.nn.functional.pad(ends, (0, 1), value=most)
    return ends.diff(prepend=torch.zeros_like(ends[:, :1]))


def _sizes(known: list[list[list[list[int]]]], owners: ExpertHosts) -> tuple[int, ...]:
    """Rows of each batch of this rank, of counts [from][to][expert][part]; none of no counts."""
    width = owners.size * owners.parts // owners.sources  # parts of a source
    parts = [[part for row in known for part in row[owners.rank][e]] for e in range(owners.each)]
    return tuple(
        sum(of_expert[start : start + width]) for of_expert in parts for start in range(0, len(of_expert), width)
    )


def _first(count: int, like: Tensor) -> Tensor:
    """1, 2, … count."""
    return torch.arange(1, count + 1, device=like.device)


def _regrouped(counts: Tensor, total: int) -> Tensor:
    """[total] int64: the indices that reorder rows sorted by (i, j) to rows sorted by (j, i).

    counts: [i, j], of rows; total: their sum. With transposed counts it is the inverse.
    """
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)
    lengths = counts.t().flatten()
    before = lengths.cumsum(0) - lengths
    shift = torch.repeat_interleave(starts.t().flatten() - before, lengths, output_size=total)
    return torch.arange(total, device=counts.device) + shift


def to_slots(x: Tensor, probs: Tensor, plan: Route) -> tuple[Tensor, Tensor]:
    """Copy tokens and their probabilities into slots. x: [n, h]; probs: [n, E] → [m, h], [m]."""
    return _ToSlots.apply(x, probs, plan)


def from_slots(y: Tensor, plan: Route) -> Tensor:
    """Add up each token's copies, in the order of the experts. y: [m, h] → [n, h]."""
    return _FromSlots.apply(y, plan)


def exchange(rows: Tensor, plan: Route, owners: ExpertHosts, *, home: bool) -> Tensor:
    """Return this rank's slots → rows of this rank, as they arrive; with `home` the inverse. rows: [m or r, …]."""
    return rows if owners.group is None else _Exchange.apply(rows, plan, owners, home)


def reordered(rows: Tensor, plan: Route, *, home: bool) -> Tensor:
    """Return this rank's rows as they arrive → in the order of its batches; with `home` the inverse. rows: [r, …]."""
    return rows if plan.sorted is None else _Reordered.apply(rows, plan, home)


class _ToSlots(LayerFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, plan: Route) -> tuple[Tensor, Tensor]:
        ctx.plan = plan
        return x[plan.token], probs.flatten()[plan.place]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        plan, (dx, dp) = ctx.plan, gradients
        dprobs = dp.new_zeros(plan.map.shape) if not len(dp) else dp[plan.slot.clamp(min=0)].where(plan.map, 0.0)
        return row_sum(dx.contiguous(), plan.copies), dprobs, None


class _FromSlots(LayerFunction):
    @staticmethod
    def forward(ctx: Any, y: Tensor, plan: Route) -> Tensor:
        ctx.plan = plan
        return row_sum(y.contiguous(), plan.copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.plan.token], None


class _Exchange(LayerFunction):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: Route, owners: ExpertHosts, home: bool) -> Tensor:
        ctx.plan, ctx.owners, ctx.home = plan, owners, home
        return _moved(rows, plan, owners, home)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _moved(gradients[0], ctx.plan, ctx.owners, not ctx.home), None, None, None


def _moved(rows: Tensor, plan: Route, owners: ExpertHosts, home: bool) -> Tensor:
    send, receive = (plan.receive, plan.send) if home else (plan.send, plan.receive)
    arriving = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(arriving, rows.contiguous(), receive, send, group=owners.group)
    return arriving


class _Reordered(LayerFunction):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: Route, home: bool) -> Tensor:
        ctx.indices = (plan.sorted, plan.arrived) if home else (plan.arrived, plan.sorted)
        return rows[ctx.indices[1]]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.indices[0]], None, None


class InvariantTokenDispatcher(MoETokenDispatcher):
    """Replaces Megatron's dispatchers by the same six steps, which MoELayer calls in this order."""

    room: Room | None = None  # of training steps

    def __init__(self, config: Any, pg_collection: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.owners = ExpertHosts.from_config(config, pg_collection.tp, pg_collection.ep)
        self.chunks = VirtualMesh.from_group(config.virtual_shards, pg_collection.tp, of_a_rank(config)).local_chunks

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[s/t, b, h], [n, E], [n, E] → slots."""
        self.shape = tokens.shape
        topk, factor, capacity = self.config.moe_router_topk, self.config.moe_expert_capacity_factor, None
        if factor is not None:  # the router drops tokens of a chunk; of whole sequences, or of several side by side
            chunks = self.chunks * tokens.shape[1]
            each = len(routing_map) // chunks
            capacity = chunks * min(each, get_capacity(each * topk, routing_map.shape[1], factor))
        self.plan = route(routing_map, topk, self.owners, capacity, self.room if torch.is_grad_enabled() else None)
        return to_slots(tokens.reshape(-1, self.shape[-1]), probs, self.plan)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Slots → rows as they arrive."""
        return tuple(exchange(part, self.plan, self.owners, home=False) for part in (hidden_states, probs))  # type: ignore[return-value]

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Batches, Tensor]:
        """Rows as they arrive → rows of the batches, and these instead of Megatron's number of tokens for each expert.

        Megatron's combined schedule frees what arrives: the experts keep these copies.
        """
        hidden_states, probs = (reordered(part, self.plan, home=False) for part in (hidden_states, probs))
        return hidden_states, self.plan.batches, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Rows of the batches → in the order in which they arrived. Expert tensor parallelism of 1 has no sum."""
        return reordered(hidden_states, self.plan, home=True)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Rows as they arrived → slots."""
        return exchange(hidden_states, self.plan, self.owners, home=True)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Slots → [s/t, b, h]."""
        return from_slots(hidden_states, self.plan).view(self.shape)
