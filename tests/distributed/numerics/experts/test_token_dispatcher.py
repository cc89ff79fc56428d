"""Tokens to experts and back on one rank: what arrives, what is added up, and the gradients."""

from dataclasses import replace

import pytest
import torch

from tests.operands import same_bits
from tp_invariant_recipes.numerics.layers.experts.expert_placement import Owners


@pytest.fixture
def token_dispatcher(bridge):
    from tp_invariant_recipes.numerics.layers.experts import token_dispatcher

    return token_dispatcher


TOKENS, EXPERTS, TOPK, WIDTH = 11, 5, 3, 3


def _map(drop: bool):
    torch.manual_seed(1)
    chosen = torch.rand(TOKENS, EXPERTS).topk(TOPK).indices
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, chosen, True)
    if drop:
        routing_map &= torch.rand(TOKENS, EXPERTS) < 0.6
        routing_map[:, 2] = False  # an expert that gets nothing
        routing_map[4] = False  # a token that goes nowhere
    return routing_map


def _owners(**changes):
    return Owners(**({"experts": EXPERTS, "size": 1, "ep": 1} | changes))


@pytest.mark.parametrize("drop", (False, True), ids=("dropless", "dropped"))
class TestSingleRank:
    def test_slots_lie_by_expert_then_token(self, token_dispatcher, drop):
        routing_map = _map(drop)
        plan = token_dispatcher.route(routing_map, TOPK, _owners())
        x, probs = torch.arange(TOKENS * WIDTH).float().view(TOKENS, WIDTH), torch.rand(TOKENS, EXPERTS)
        rows, weights = token_dispatcher.to_slots(x, probs, plan)
        expert, token = routing_map.t().nonzero().unbind(1)
        assert same_bits(rows, x[token])
        assert same_bits(weights, probs[token, expert])
        assert plan.batches.groups.sizes == tuple(routing_map.sum(0).tolist())

    def test_copies_are_added_by_expert(self, token_dispatcher, drop):
        routing_map = _map(drop)
        plan = token_dispatcher.route(routing_map, TOPK, _owners())
        rows = torch.randn(int(routing_map.sum()), WIDTH)
        expected = torch.zeros(TOKENS, WIDTH)
        for (_, token), row in zip(routing_map.t().nonzero().tolist(), rows, strict=True):  # experts in order
            expected[token] += row
        assert same_bits(token_dispatcher.from_slots(rows, plan), expected)

    def test_gradients(self, token_dispatcher, drop):
        routing_map = _map(drop)
        plan = token_dispatcher.route(routing_map, TOPK, _owners())
        x = torch.randn(TOKENS, WIDTH, dtype=torch.float64).float().requires_grad_()
        probs = torch.rand(TOKENS, EXPERTS).requires_grad_()
        rows, weights = token_dispatcher.to_slots(x, probs, plan)
        token_dispatcher.from_slots(rows * weights.unsqueeze(1), plan).square().sum().backward()
        results = x.grad.clone(), probs.grad.clone()
        x.grad = probs.grad = None
        (x * (probs * routing_map).sum(1, keepdim=True)).square().sum().backward()
        for mine, expected in zip(results, (x.grad, probs.grad), strict=True):
            torch.testing.assert_close(mine, expected)
        assert not results[1][~routing_map].any()


class TestInAGraph:
    """The host knows no number of slots. The rows of a batch are the same, and no sum reads others."""

    @pytest.fixture
    def captured(self, token_dispatcher, monkeypatch):
        return lambda now=True: monkeypatch.setattr(token_dispatcher, "_in_a_graph", lambda _: now)

    @pytest.mark.parametrize("capacity", (None, 6), ids=("dropless", "capacity"))
    def test_one_rank(self, token_dispatcher, captured, capacity):
        results, routing_map = [], _map(capacity is not None)
        x, probs = torch.rand(TOKENS, WIDTH, requires_grad=True), torch.rand(TOKENS, EXPERTS, requires_grad=True)
        for now in (False, True):
            captured(now)
            plan = token_dispatcher.route(routing_map, TOPK, _owners(), capacity)
            rows, weights = token_dispatcher.to_slots(x, probs, plan)
            of_any = min(TOPK * TOKENS, EXPERTS * (capacity or TOKENS))
            assert (plan.batches.groups.total, len(rows)) == ((of_any,) * 2 if now else (0, int(routing_map.sum())))
            y = token_dispatcher.from_slots((rows * weights.unsqueeze(1)).requires_grad_(), plan)
            of_inputs = torch.autograd.grad((y * y.detach()).sum(), (x, probs))
            results.append((rows[: int(routing_map.sum())], y, plan.batches.groups.counts, *of_inputs))
        assert all(same_bits(*pair) for pair in zip(*results, strict=True))

    @pytest.mark.parametrize("capacity", (None, TOKENS), ids=("dropless", "capacity"))
    @pytest.mark.parametrize("ep, sources, parts", ((4, 1, 1), (2, 2, 1), (4, 4, 1), (4, 8, 2)), ids=str)
    def test_four_ranks(self, token_dispatcher, captured, monkeypatch, ep, sources, parts, capacity):
        experts, size, tokens = 8, 4, TOKENS + 1
        torch.manual_seed(0)
        maps = [
            torch.zeros(tokens, experts).scatter(1, torch.rand(tokens, experts).topk(2)[1], 1).bool()
            for _ in range(size)
        ]
        maps[0][:TOKENS] = torch.arange(experts) < 2  # as many of a rank's tokens as one owner takes
        maps[0][TOKENS] = torch.arange(experts) >= experts - 2
        owners = [Owners(experts, size, ep, rank, sources, "group", parts) for rank in range(size)]
        counts = [
            each.by_owner(routed.t()).view(experts, parts, -1).sum(2).flatten()
            for each, routed in zip(owners, maps, strict=True)
        ]
        monkeypatch.setattr(
            token_dispatcher.dist, "all_gather_into_tensor", lambda out, own, group: out.copy_(torch.cat(counts))
        )
        x = [torch.randn(tokens, WIDTH) for _ in range(size)]

        def moved(now):
            """Of each owner: the rows of its batches; and what comes home to each rank's tokens from these rows."""
            captured(now)
            plans = [
                token_dispatcher.route(routed, 2, owner, capacity) for routed, owner in zip(maps, owners, strict=True)
            ]
            slots = [
                token_dispatcher.to_slots(each, routed.float(), plan)[0]
                for each, routed, plan in zip(x, maps, plans, strict=True)
            ]
            sent = [part.split(plan.send) for part, plan in zip(slots, plans, strict=True)]
            arrived = [torch.cat([parts[rank] for parts in sent])[plan.sorted] for rank, plan in enumerate(plans)]
            back = [each[plan.arrived].split(plan.receive) for each, plan in zip(arrived, plans, strict=True)]
            home = [torch.cat([parts[rank] for parts in back]) for rank in range(size)]
            assert all(same_bits(*pair) for pair in zip(home, slots, strict=True))
            ends = [plan.batches.groups.ends for plan in plans]
            batches = [each[: end[-1]].tensor_split(end[:-1]) for each, end in zip(arrived, ends, strict=True)]
            sums = [token_dispatcher.from_slots(each, plan) for each, plan in zip(home, plans, strict=True)]
            return [part for each in batches for part in each] + sums

        pairs = [*zip(moved(False), moved(True), strict=True)]
        assert len(pairs) == experts * sources + size
        assert all(same_bits(*pair) for pair in pairs)


def test_batches_of_two_sources(token_dispatcher):
    from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups

    groups = Groups((3, 1, 0, 2), torch.tensor((3, 1, 0, 2)))
    batches = token_dispatcher.Batches(groups, first=4, sources=2)
    assert [(batches.expert(b), batches.source(b)) for b in range(4)] == [(4, 0), (4, 1), (5, 0), (5, 1)]
    assert [*batches.experts] == [4, 5]
    assert batches.buffers == 2
    assert [*batches.in_order("abcd")] == [("a", 0), ("b", 1), ("c", 2), ("d", 3)]
    chained = replace(batches, chain=(1, 0))
    assert chained.buffers == 1
    assert [*chained.in_order("ab")] == [("a", 1), ("a", 0), ("b", 3), ("b", 2)]


def test_rows_from_ranks_are_regrouped_by_expert_and_back(token_dispatcher):
    counts = torch.tensor([[2, 0, 1], [1, 2, 0]])  # from two ranks, of three experts
    by_expert, back = token_dispatcher._regrouped(counts, 6), token_dispatcher._regrouped(counts.t(), 6)
    assert by_expert.tolist() == [0, 1, 3, 4, 5, 2]
    assert by_expert[back].tolist() == list(range(6))
