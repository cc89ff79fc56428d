# SPDX-License-Identifier: Apache-2.0
"""Gradients of a rank's data shards: a tree, with log2 of their number of buffers, whatever adds to them in between."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.operands import same_bits
from tp_invariant_recipes.kernels.tree_add import tree_add
from tp_invariant_recipes.numerics.layers import embedding, linear
from tp_invariant_recipes.numerics.megatron import data_parallel
from tp_invariant_recipes.numerics.sums.data_shards import ShardCounter
from tp_invariant_recipes.numerics.sums.expert_groups import order_of_visits
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.weight_gradient import CONTEXTS, LEAF

EACH = 3  # micro-batches of a shard


def _micro_batches(shards, each=EACH):
    generator = torch.Generator().manual_seed(0)
    scales = 2.0 ** torch.randint(-9, 9, (shards, each, 1), generator=generator)
    return torch.randn(shards, each, 40, generator=generator) * scales


def _counted(counter, gradient, values, late=False):
    """late: a micro-batch ends before it has added its gradient."""
    gradient.zero_()
    for micro_batch in values.flatten(0, 1):
        if late:
            counter.end_micro_batch()
        gradient.add_(micro_batch)
        if not late:
            counter.end_micro_batch()
    for part in (slice(0, 16), slice(16, 40)):  # as buckets are
        counter.finish(gradient, part)
    counter.restart()
    return gradient.clone()


def _added_in_tree(values):
    sums = values[:, 0].clone()
    for micro_batch in range(1, values.shape[1]):
        sums += values[:, micro_batch]
    return tree_add(sums, torch.empty(40))


@pytest.mark.parametrize("each", (1, EACH))
@pytest.mark.parametrize("shards", (2, 4, 8))
def test_shards_are_added_as_a_tree(shards, each):
    gradient = torch.zeros(40)
    counter = ShardCounter(shards, each, lambda: [gradient])
    values = _micro_batches(shards, each)
    for _ in range(2):  # a second step begins anew
        assert same_bits(_counted(counter, gradient, values), _added_in_tree(values))
    if shards * each > 2:
        assert not same_bits(values.flatten(0, 1).sum(0), _added_in_tree(values))
        assert not same_bits(_counted(counter, gradient, values, late=True), _added_in_tree(values))
    levels = shards.bit_length() - (2 if each == 1 else 1)
    assert [len(buffers) for buffers in counter._free.values()] == [levels] * (levels > 0)


@pytest.mark.parametrize("each", (1, 2, EACH))
@pytest.mark.parametrize("shards, turns", ((2, 2), (4, 2), (4, 4), (8, 4), (8, 8)))
def test_shards_that_take_turns_are_added_as_a_tree(shards, turns, each):
    gradient = torch.zeros(40)
    counter = ShardCounter(shards, each, lambda: [gradient], turns=turns)
    values = _micro_batches(shards, each)
    visits = order_of_visits(shards, each, turns)
    visited = values.flatten(0, 1)[visits].view(shards, each, 40)
    for _ in range(2):
        assert same_bits(_counted(counter, gradient, visited), _added_in_tree(values))
    width = turns if each > 1 else turns // 2
    (kept,) = counter._free.values() if counter.nodes > 1 else ([],)
    assert len(kept) == width - 1 + (shards // turns).bit_length() - 1


def test_a_rank_that_has_half_of_the_shards_has_half_of_the_tree():
    values, nodes = _micro_batches(8), []
    for half in values.chunk(2):
        gradient = torch.zeros(40)
        nodes.append(_counted(ShardCounter(4, EACH, lambda gradient=gradient: [gradient]), gradient, half))
    assert same_bits(nodes[0] + nodes[1], _added_in_tree(values))


@pytest.mark.parametrize("first", range(8))
@pytest.mark.parametrize("each", (1, 2))
def test_a_buffer_that_appears_late_has_had_nothing_before(each, first):
    """first: the shard that brings it."""
    always, late = torch.zeros(40), torch.zeros(40)
    results = [always]
    counter, values = ShardCounter(8, each, lambda: results), _micro_batches(8, each)
    expected = values.clone()
    expected[:first] = 0.0
    for shard, micro_batches in enumerate(values):
        if shard == first:
            results.append(late)
        for micro_batch in micro_batches:
            always.add_(micro_batch)
            if shard >= first:
                late.add_(micro_batch)
            counter.end_micro_batch()
    for gradient in results:
        counter.finish(gradient)
    assert same_bits(always, _added_in_tree(values))
    assert same_bits(late, _added_in_tree(expected))


def test_one_shard_keeps_nothing():
    gradient = torch.ones(40)
    counter = ShardCounter(1, 4, lambda: [gradient])
    counter.finish(gradient)
    counter.restart()
    assert gradient.unique().tolist() == [1]
    assert not counter._held


def test_a_step_of_another_number_of_micro_batches_is_an_error():
    gradient = torch.zeros(40)
    counter = ShardCounter(2, 2, lambda: [gradient])
    counter.end_micro_batch()
    with pytest.raises(RuntimeError, match="a step had 1 micro-batches, not 2 shards of 2"):
        counter.restart()
    counter = ShardCounter(2, 1, lambda: [gradient])
    counter.end_micro_batch()
    counter.end_micro_batch()
    with pytest.raises(RuntimeError, match="more than 2 shards of 1 micro-batches"):
        counter.end_micro_batch()


@pytest.mark.parametrize("each", (1, 2))
def test_a_counter_may_have_no_gradients(each):
    """Of the experts of a dense model, or of a pipeline stage without any."""
    counter = ShardCounter(4, each, list)
    for _ in range(2):
        for _ in range(4 * each):
            counter.end_micro_batch()
        counter.restart()


TOKENS, WIDTH, ROWS = 24, 16, 5  # every number occurs several times in a sequence


def _weight(rows, contexts=1, leaf=True, tied=False):
    weight = torch.randn(rows, WIDTH).bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(rows, WIDTH)
    setattr(weight, CONTEXTS, [torch.zeros(rows, WIDTH) for _ in range(contexts - 1)])
    setattr(weight, LEAF, leaf)
    weight.zero_out_wgrad = tied
    return weight


def _looked_up(weight, batches, contexts):
    """What backward passes of lookups add up to, in a rank with two shards."""
    for ids, dy in batches:
        embedding.lookup(weight, ids, None, contexts).backward(dy)
    if hasattr(weight, embedding.TIED):
        return weight.lookup_gradient
    return torch.stack([weight.main_grad, *getattr(weight, CONTEXTS)])


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("contexts", (1, 2))
def test_the_rows_of_a_leaf_are_added_up_before_they_join_another(contexts, tied):
    torch.manual_seed(0)
    batches = [
        (torch.randint(ROWS, (1, TOKENS)), torch.randn(1, TOKENS, WIDTH).bfloat16() * 2.0**scale) for scale in (0, 7)
    ]

    def gradient_of(batches, **options):
        return _looked_up(_weight(ROWS, contexts, tied=tied, **options), batches, contexts)

    first, second = (gradient_of([batch], leaf=False) for batch in batches)
    assert same_bits(gradient_of(batches), first + second)
    assert not same_bits(gradient_of(batches, leaf=False), first + second)


@pytest.mark.parametrize("passes", (1, 2, 3))
def test_lookups_that_wait_have_the_same_sum(passes):
    """With as many passes as fill the rows; they take the values of then, and their sum is freed."""
    rows, apart = 2 * TOKENS, []
    for waits in (0, passes):
        torch.manual_seed(0)
        weight = _weight(rows, leaf=False, tied=True)
        setattr(weight, embedding.PASSES, waits)
        for _ in range(passes):
            dy = torch.randn(1, TOKENS, WIDTH).bfloat16()
            embedding.lookup(weight, torch.randint(ROWS, (1, TOKENS)), None).backward(dy)
            dy.zero_()
        assert (getattr(weight, embedding.LOOKUPS, None) is None) == (waits in (1, 2))
        apart.append(embedding.sums_of_their_own(weight)[0].clone())
        embedding.begin_step(weight)
        assert all(kept is None or not kept.any() for kept in [getattr(weight, embedding.LOOKUPS)])
        assert len(embedding.sums_of_their_own(weight)) == (waits not in (1, 2))
    assert same_bits(*apart)
    assert apart[0].any()


def test_a_second_gradient_of_a_weight_in_a_leaf_is_an_error():
    mesh = VirtualMesh(1, 1, 0)
    x = torch.randn(4, 1, WIDTH).bfloat16()
    for leaf in (False, True):
        weight = _weight(WIDTH, leaf=leaf)

        def used(times, weight=weight):
            y = x
            for _ in range(times):
                y = linear.column_parallel(y, weight, mesh, 1, False)
            y.sum().backward()

        used(1)
        used(1)  # another backward pass
        with pytest.raises(RuntimeError, match="two gradients in one backward pass") if leaf else nullcontext():
            used(2)


def test_a_pass_that_adds_several_times_forms_no_pairs():
    counters = [ShardCounter(4, 1, list, once=once) for once in (True, False)]
    assert [(counter.pairs, counter.nodes) for counter in counters] == [(True, 2), (False, 4)]


def test_a_ranks_sums_are_added_as_neighbours_of_a_tree():
    sums = [torch.tensor([2.0**24]), torch.tensor([1.0]), torch.tensor([-(2.0**24)]), torch.tensor([1.0])]
    assert (sums[0] + sums[1]) + (sums[2] + sums[3]) != (sums[0] + sums[2]) + (sums[1] + sums[3])
    bucket = SimpleNamespace(offset=0, grad_data=sums[0], buffers=sums, gradient_scaling_factor=1.0)
    data_parallel._complete(SimpleNamespace(buckets=[bucket]))
    assert bucket.grad_data.item() == 1.0


@pytest.mark.parametrize(
    "given, wanted", (((2, True), (1, True)), ((None, False), (None, False)), ((), (1, "last of e")))
)
def test_a_loss_is_divided_by_all_ranks_and_not_multiplied_by_those_of_a_context(monkeypatch, given, wanted):
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 3)
    monkeypatch.setattr(parallel_state, "is_pipeline_last_stage", lambda ignored, stage: f"last of {stage}")
    divided = data_parallel.divided_by_all_ranks(lambda *args: args)
    store: list = []  # of losses, which the micro-batch is added to
    assert divided(*"abcdef", 5, store, *given) == (*"abcdef", 15, store, *wanted)
