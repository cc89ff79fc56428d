"""Tokens on their way to the experts' owners and back. Only bytes move; what is added here is a token's few copies.

On a rank, a copy of a token for an expert is a *slot*. Slots lie by owner, then expert, then token. An owner receives
those of all ranks in rank order, which is the order of the sequence, and sorts them by expert: so it has an expert's
tokens of the whole micro-batch in the same order, and as many, in every layout.

Backward, and where a token's copies are added up again, the experts' numbers say the order.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from tp_invariant_recipes.kernels.row_sum import row_sum
from tp_invariant_recipes.numerics.owners import Owners


@dataclass(frozen=True)
class Batches:
    """The tokens that this rank computes with, one batch for each of its experts and each source.

    sizes: tokens of each batch, expert after expert, source after source. first: the first expert's local number.
    """

    sizes: tuple[int, ...]
    first: int
    sources: int

    def expert(self, batch: int) -> int:
        """The local number of a batch's expert."""
        return self.first + batch // self.sources

    def source(self, batch: int) -> int:
        """Which data-parallel rank of those that share the expert the batch is from."""
        return batch % self.sources


@dataclass(frozen=True)
class Route:
    """Where everything goes in one layer and micro-batch. n tokens here, E experts, m slots; r rows arrive here.

    map:      [n, E] bool, which experts a token goes to; slot: [n, E] int64, where its copy lies, if it does.
    copies:   [n, topk] int64, a token's slots by expert, -1 for none; token: [m] int64, of each slot.
    send:     slots for each rank; receive: rows from each; empty if this rank is alone.
    sorted:   [r] int64, the rows that arrive in the order of the batches; arrived: [r], the inverse.
    """

    map: Tensor
    slot: Tensor
    copies: Tensor
    token: Tensor
    send: list[int]
    receive: list[int]
    sorted: Tensor | None
    arrived: Tensor | None
    batches: Batches


@torch.no_grad()
def route(routing_map: Tensor, topk: int, owners: Owners) -> Route:
    """Plan the way of a micro-batch. routing_map: [n, E] bool. One collective of counts, and one wait for them."""
    n, experts = routing_map.shape
    order = torch.tensor(owners.order(), device=routing_map.device)
    by_owner = routing_map.t()[order]
    counts = by_owner.sum(1)
    everyone = counts
    if owners.group is not None:
        everyone = counts.new_empty(owners.size * experts)
        dist.all_gather_into_tensor(everyone, counts, group=owners.group)
    known: list[list[list[int]]] = everyone.view(owners.size, owners.size, owners.each).tolist()  # [from][to][expert]

    total = sum(map(sum, known[owners.rank]))
    slot = torch.empty(experts, n, dtype=torch.int64, device=routing_map.device)
    slot[order] = (by_owner.flatten().cumsum(0) - 1).view(experts, n)
    slot = slot.t().contiguous()
    # A place of its own for whatever there is no slot for.
    nth = (routing_map.cumsum(1) - 1).where(routing_map, topk)
    copies = slot.new_full((n, topk + 1), -1).scatter_(1, nth, slot)[:, :topk].contiguous()
    tokens = torch.arange(n, device=slot.device).unsqueeze(1).expand(n, experts)
    token = slot.new_empty(total + 1).scatter_(0, slot.where(routing_map, total).flatten(), tokens.flatten())[:total]

    mine = [known[rank][owners.rank] for rank in range(owners.size)]  # [from][expert]
    per_source = owners.size // owners.sources
    sizes = tuple(
        sum(mine[rank][e] for rank in range(source * per_source, (source + 1) * per_source))
        for e in range(owners.each)
        for source in range(owners.sources)
    )
    batches = Batches(sizes, owners.first_local, owners.sources)
    if owners.group is None:
        return Route(routing_map, slot, copies, token, [], [], None, None, batches)
    in_order = _by_expert(torch.tensor(mine, device=slot.device), sum(sizes))
    arrived = torch.empty_like(in_order).scatter_(0, in_order, torch.arange(len(in_order), device=slot.device))
    send = [sum(to) for to in known[owners.rank]]
    return Route(routing_map, slot, copies, token, send, [sum(row) for row in mine], in_order, arrived, batches)


def _by_expert(counts: Tensor, total: int) -> Tensor:
    """[total] int64: rows that lie by rank, then expert, in the order by expert, then rank.

    counts: [ranks, experts].
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


def exchange(rows: Tensor, plan: Route, owners: Owners, *, home: bool) -> Tensor:
    """Slots here → rows of this rank's batches; with `home` the way back. rows: [m or r, …]."""
    return rows if owners.group is None else _Exchange.apply(rows, plan, owners, home)


class _ToSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, plan: Route) -> tuple[Tensor, Tensor]:
        ctx.plan = plan
        total = len(plan.token)
        slot = plan.slot.where(plan.map, total).flatten()
        return x[plan.token], probs.new_empty(total + 1).scatter_(0, slot, probs.flatten())[:total]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        plan, (dx, dp) = ctx.plan, gradients
        dprobs = dp.new_zeros(plan.map.shape) if not len(dp) else dp[plan.slot.clamp(min=0)].where(plan.map, 0.0)
        return row_sum(dx.contiguous(), plan.copies), dprobs, None


class _FromSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, plan: Route) -> Tensor:
        ctx.plan = plan
        return row_sum(y.contiguous(), plan.copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.plan.token], None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: Route, owners: Owners, home: bool) -> Tensor:
        ctx.plan, ctx.owners, ctx.home = plan, owners, home
        return _moved(rows, plan, owners, home)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _moved(gradients[0], ctx.plan, ctx.owners, not ctx.home), None, None, None


def _moved(rows: Tensor, plan: Route, owners: Owners, home: bool) -> Tensor:
    send, receive = (plan.receive, plan.send) if home else (plan.send, plan.receive)
    leaving = rows[plan.arrived] if home else rows.contiguous()
    arriving = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(arriving, leaving, receive, send, group=owners.group)
    return arriving if home else arriving[plan.sorted]


class InvariantTokenDispatcher(MoETokenDispatcher):
    """Stands for Megatron's dispatchers: the same six steps, called by MoELayer in this order."""

    def __init__(self, config: Any, pg_collection: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.owners = Owners.of(config.num_moe_experts, pg_collection.tp, pg_collection.ep)

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[s/t, b, h], [n, E], [n, E] → slots."""
        self.shape = tokens.shape
        self.plan = route(routing_map, self.config.moe_router_topk, self.owners)
        return to_slots(tokens.reshape(-1, self.shape[-1]), probs, self.plan)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Slots → rows of the batches."""
        return tuple(exchange(part, self.plan, self.owners, home=False) for part in (hidden_states, probs))  # type: ignore[return-value]

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Batches, Tensor]:
        """Rows as they are, and the batches they belong to, in place of a number of tokens for each expert."""
        return hidden_states, self.plan.batches, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Nothing: with expert tensor parallelism of 1 there is nothing to add."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Rows of the batches → slots."""
        return exchange(hidden_states, self.plan, self.owners, home=True)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Slots → [s/t, b, h]."""
        return from_slots(hidden_states, self.plan).view(self.shape)
