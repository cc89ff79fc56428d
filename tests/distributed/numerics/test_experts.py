# SPDX-License-Identifier: Apache-2.0
"""Tokens to experts and back on one rank: what arrives, what is added up, and the gradients. The invariant router:
what it counts, and the auxiliary losses that it logs and attaches. Gradients of experts over data-parallel ranks:
an owner of several ranks' tokens adds them as the ranks would.
"""

from dataclasses import replace

import pytest
import torch

from tests.distributed.ranks import megatron, on_ranks, terms
from tests.operands import same_bits
from tp_invariant_recipes.numerics.layers.experts.expert_placement import ExpertHosts
from tp_invariant_recipes.numerics.megatron import replacements
from tp_invariant_recipes.numerics.settings import NumericsSettings
from tp_invariant_recipes.numerics.sums.weight_gradient import gradients_of
from tp_invariant_recipes.replacement import applied


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
    return ExpertHosts(**({"experts": EXPERTS, "size": 1, "ep": 1} | changes))


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
        return lambda now=True: monkeypatch.setattr(token_dispatcher, "capturing", lambda _: now)

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
        owners = [ExpertHosts(experts, size, ep, rank, sources, "group", parts) for rank in range(size)]
        counts = [
            each.by_owner(routed.t()).view(experts, parts, -1).sum(2).flatten()
            for each, routed in zip(owners, maps, strict=True)
        ]
        monkeypatch.setattr(
            token_dispatcher.dist, "all_gather_into_tensor", lambda out, own, group: out.copy_(torch.cat(counts))
        )
        x = [torch.randn(tokens, WIDTH) for _ in range(size)]

        monkeypatch.setattr(token_dispatcher, "MARGIN", 1.0)
        rooms = [token_dispatcher.Room(torch.tensor(0, dtype=torch.int32)) for _ in owners]

        def moved(now):
            """Of each owner: the rows of its batches; and what comes home to each rank's tokens from these rows."""
            captured(now)
            plans = [
                token_dispatcher.route(routed, 2, owner, capacity, room)
                for routed, owner, room in zip(maps, owners, rooms, strict=True)
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
        assert not any(room.lacking for room in rooms)
        for room in rooms:
            room.most -= 1
        moved(True)
        assert all(room.lacking for room in rooms)


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


@pytest.mark.parametrize("needs, computed", (((5, 6, 6), 3), ((5, 6, 30), 6)), ids=("enough", "void"))
def test_a_step_whose_graph_lacks_slots_is_computed_again(token_dispatcher, monkeypatch, needs, computed):
    """Three steps, the last two in a graph: a void one leaves neither gradients nor biases of routers."""
    from megatron.core import full_cuda_graph

    from tp_invariant_recipes.numerics.megatron import graph_room

    buffers, calls = full_cuda_graph.StaticBufferLoader.static_buffers, []
    monkeypatch.setitem(buffers, "training", [])
    monkeypatch.setattr(graph_room.dist, "all_reduce", lambda *_: None)
    monkeypatch.setattr(graph_room.dist, "get_rank", lambda: 0)
    dispatcher = object.__new__(token_dispatcher.InvariantTokenDispatcher)
    dispatcher.owners = _owners(size=2, group="group")
    model = torch.nn.Linear(1, 1)
    model.token_dispatcher, model.zero_grad_buffer = dispatcher, lambda: setattr(model, "gradients", 0)
    model.register_buffer("expert_bias", torch.zeros(1))

    class Wrapper:
        cuda_graph, result, curr_iteration = {"training": None}, {"training": None}, {"training": 0}
        cuda_graph_warmup_steps = 1

        def __call__(self, *, data_iterator, **_):
            buffers["training"][:] = [next(data_iterator)]
            (need,) = buffers["training"]
            if self.curr_iteration["training"] == 1:
                self.cuda_graph["training"], self.slots = "graph", dispatcher.room.limited(99, torch.tensor(0))
            if self.cuda_graph["training"] is None:
                dispatcher.room.most = need
            elif need > self.slots:
                dispatcher.room.lacking.fill_(1)
            self.curr_iteration["training"] += 1
            model.gradients += need
            model.expert_bias += need
            calls.append(need)
            return f"losses {need}"

    run = graph_room.with_room(Wrapper)()
    for number, need in enumerate(needs):
        model.gradients = 0
        assert (
            run(model=[model], forward_only=False, data_iterator=iter([need]), num_microbatches=1) == f"losses {need}"
        )
        assert model.gradients == need
        assert model.expert_bias.item() == sum(needs[: number + 1])
    assert len(calls) == computed


def test_rows_from_ranks_are_regrouped_by_expert_and_back(token_dispatcher):
    counts = torch.tensor([[2, 0, 1], [1, 2, 0]])  # from two ranks, of three experts
    by_expert, back = token_dispatcher._regrouped(counts, 6), token_dispatcher._regrouped(counts.t(), 6)
    assert by_expert.tolist() == [0, 1, 3, 4, 5, 2]
    assert by_expert[back].tolist() == list(range(6))


ROUTED, HIDDEN, CHOICES = 1032, 32, 4
SHARDS, SEQUENCE, BATCH = 4, 64, 2


def _router(invariant=True, shards=1, **fields):
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.router import TopKRouter

    from tp_invariant_recipes.numerics.megatron.router import InvariantTopKRouter

    contexts = fields.pop("context_shards", 1)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, num_moe_experts=CHOICES, moe_router_topk=2,
        add_bias_linear=False, **fields,
    )  # fmt: skip
    config.virtual_shards, config.context_shards = shards, contexts
    return (InvariantTopKRouter if invariant else TopKRouter)(config, pg_collection=get_default_pg_collection())


def _counts(mesh, invariant):
    """Tokens of each expert as the router counts them in two micro-batches, and as they are."""
    with megatron(mesh, expert_model_parallel_size=1, expert_tensor_parallel_size=1):
        router = _router(
            invariant, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
            moe_router_load_balancing_type="none", params_dtype=torch.bfloat16, bf16=True,
        )  # fmt: skip
        router.bfloat16()  # as Megatron's Float16Module does, counts and all
        seen = torch.zeros(CHOICES, dtype=torch.int64)
        for _ in range(2):
            seen += router(torch.randn(ROUTED, 1, HIDDEN).bfloat16())[1].sum(0)
        return router.local_tokens_per_expert.tolist(), seen.tolist()


@pytest.mark.parametrize("invariant", (True, False), ids=("invariant", "stock"))
def test_counts_are_exact(bridge, invariant):
    """They decide which way an expert's bias goes; rounded, they would depend on how many a rank has."""
    ((counted, seen),) = on_ranks(1, 1, _counts, invariant)
    assert (counted == seen) is invariant


def _losses(mesh, cp):
    """What this rank adds to each logged loss, and to the gradient of its tokens from the losses alone; and stock's."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    degrees = {"context_parallel_size": cp, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
    tp = mesh.size // cp
    with megatron(mesh, tensor_model_parallel_size=tp, **degrees):
        rank = parallel_state.get_context_parallel_rank() * tp + parallel_state.get_tensor_model_parallel_rank()
        results = []
        for invariant in (True, False):
            router = _router(
                invariant, SHARDS, context_shards=2, context_parallel_size=cp, tensor_model_parallel_size=tp,
                sequence_parallel=tp > 1, moe_z_loss_coeff=0.1, moe_aux_loss_coeff=0.1,
                moe_router_load_balancing_type="aux_loss",
            )  # fmt: skip
            router.set_layer_number(1)
            router.weight.data = terms(CHOICES, HIDDEN, seed=1) / 64
            x = terms(SEQUENCE, BATCH, HIDDEN).chunk(mesh.size)[rank].clone().requires_grad_()
            probs, _ = router(x)
            probs.backward(torch.zeros_like(probs))
            tracker = get_moe_metrics_tracker()
            results.append(({name: metric.values.clone() for name, metric in tracker.metrics.items()}, x.grad))
            tracker.clear()
        return rank, results


def _whole(size, cp):
    """The sum of what ranks log, as Megatron adds it, and the gradients of all tokens; and stock's."""
    ranks = sorted(on_ranks(size, SHARDS, _losses, cp), key=lambda result: result[0])
    for of_ranks in zip(*(results for _, results in ranks), strict=True):
        logged = {name: sum(logged[name] for logged, _ in of_ranks) for name in ("z_loss", "load_balancing_loss")}
        yield logged | {"gradient": torch.cat([gradient for _, gradient in of_ranks])}


def test_losses_are_the_same_for_every_tp_and_cp(bridge):
    """Stock's have the same but for rounding, and not in one layout's bits."""
    (single, stock), *others = (tuple(_whole(size, cp)) for size, cp in ((1, 1), (2, 1), (4, 2)))
    for name in single:
        torch.testing.assert_close(single[name], stock[name], rtol=1e-4, atol=1e-7)
    for other, _ in others:
        assert [name for name in single if not same_bits(single[name], other[name])] == []
    assert not same_bits(stock["z_loss"], others[-1][1]["z_loss"])


def _global_losses(mesh):
    """(sequence, loss, tokens of each expert) of the four micro-batches of three steps; each token's shares; and the
    loss of two shards beside each other.
    """
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator as forget
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    from tp_invariant_recipes.numerics.sums import expert_groups

    with megatron(mesh, expert_model_parallel_size=1, expert_tensor_parallel_size=1):
        init_num_microbatches_calculator(0, None, 4, 1, 1)
        router = _router(moe_aux_loss_coeff=0.1, moe_router_load_balancing_type="global_aux_loss")
        router.config.data_shards = 2
        router.set_layer_number(1)
        xs, tracker, found = terms(4, SEQUENCE, HIDDEN).unsqueeze(2), get_moe_metrics_tracker(), []
        for order in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 2, 3)):  # of a step, sequences 2n and 2n + 1 of a shard
            expert_groups.enter(order)
            for sequence in order:
                map_ = router(xs[sequence])[1]
                (metric,) = tracker.metrics.values()
                found.append((sequence, metric.values.sum().item(), map_.sum(0)))
                tracker.clear()
            router.reset_global_aux_loss_tracker()
        router(xs[0])
        vars(router).update(router.of_other_shards(2))
        tracker.clear()
        router(torch.cat((xs[0], xs[2]), 1))  # the first sequences of both shards
        (metric,) = tracker.metrics.values()
        beside = metric.values.sum().item()
        forget()
        logits = [torch.softmax(router.gating(x).float().view(-1, CHOICES), 1).double() for x in xs]
        return [found[n : n + 4] for n in (0, 4, 8)], logits, beside


def test_the_loss_of_a_global_batch_counts_the_data_shard_so_far(bridge):
    """From nothing in each step, in any order of the shards: the mean of its sequences' tokens by an expert's share."""
    ((steps, shares, beside),) = on_ranks(1, 1, _global_losses)
    for step in steps:
        tokens = {sequence: counts for sequence, _, counts in step}
        for sequence, loss, _ in step:
            seen = [tokens[n] for n in (sequence // 2 * 2, sequence) if n <= sequence]
            mean = torch.stack(seen).double().mean(0)
            factor = CHOICES / (2 * SEQUENCE**2)  # Megatron logs it without its coefficient
            assert loss == pytest.approx((shares[sequence].sum(0) * mean).sum().item() * factor, rel=1e-5), sequence
    assert [loss for _, loss, _ in steps[0]] == [loss for _, loss, _ in steps[2]]
    alone = {sequence: loss for sequence, loss, _ in steps[0]}
    assert beside == pytest.approx((alone[0] + alone[2]) / 2, rel=1e-6)  # a guard's pass counts from nothing


NUMERICS = NumericsSettings(virtual_shards=1)
SMALLEST = 2.0**-149  # of fp32; a half of it is 0
SIZES = {"subnormal": SMALLEST, "ordinary": 1.0, "large": 2.0**127 * 1.5 / 2**10}


def _sources(size, ranks):
    """The gradients that the tokens of the data-parallel ranks give one expert."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randint(-(2**10), 2**10, (64, 4), generator=generator).float() for _ in range(ranks)]
    # Sums of several ordinary ones are rounded.
    return [(x * (1 + 3.0 ** -(n + 1)) if size == "ordinary" else x) * SIZES[size] for n, x in enumerate(whole)]


def _reduced(mesh, ep):
    """Size -> what the optimizer gets for an expert's weight.

    ep=1: each rank has the gradient of its own tokens; else a rank has those of ep ranks.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    from tp_invariant_recipes.cpu_host import cpu

    with cpu.installed(), applied(replacements.replacements(NUMERICS)):
        parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=mesh.size,
            expert_model_parallel_size=ep,
        )  # fmt: skip
        config.expert_groups = mesh.size  # a buffer for each rank's tokens
        return {size: _of_size(size, mesh, ep, config) for size in SIZES}


def _of_size(size, mesh, ep, config):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    module = torch.nn.Linear(4, 64, bias=False)
    module.weight.allreduce = ep == 1  # as Megatron marks the weights of experts
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module)
    sources = _sources(size, mesh.size)
    first = mesh.rank // ep * ep
    mine = sources[first : first + ep] if ep > 1 else [sources[mesh.rank]]
    for buffer, source in zip(gradients_of(module.weight), mine, strict=True):
        buffer.copy_(source)
    model.finish_grad_sync()
    result = module.weight.main_grad.clone()
    model.zero_grad_buffer()
    assert not any(buffer.count_nonzero() for buffer in gradients_of(module.weight))
    return result


def test_every_layout_scales_before_it_adds_and_adds_by_one_tree(bridge):
    ranks = 4
    separate, *grouped = (on_ranks(ranks, ranks, _reduced, ep)[0] for ep in (1, 2, 4))
    for size in SIZES:
        sums = [source / ranks for source in _sources(size, ranks)]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
        assert same_bits(separate[size], sums[0]), size
        assert all(same_bits(other[size], separate[size]) for other in grouped), size


@pytest.mark.parametrize("size", ("subnormal", "large"))
def test_the_order_matters(size):
    """The control: for these numbers the half of the sum is not the sum of the halves."""
    first, second = _sources(size, 2)
    assert not same_bits((first + second) / 2, first / 2 + second / 2)


def test_the_tree_matters():
    a, b, c, d = (source / 4 for source in _sources("ordinary", 4))
    assert not same_bits((a + b) + (c + d), ((a + b) + c) + d)
