"""Gradients of a rank's data shards: a tree, with log2 of their number of buffers, whatever adds to them in between."""

import pytest
import torch

from tests.distributed.ranks import same_bits
from tp_invariant_recipes.kernels.tree_add import tree_add
from tp_invariant_recipes.numerics.data_shards import ShardCounter

EACH = 3  # micro-batches of a shard


def _micro_batches(shards):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shards, EACH, 40, generator=generator) * 2.0 ** torch.randint(-9, 9, (shards, EACH, 1))


def _counted(counter, gradient, values):
    gradient.zero_()
    for micro_batch in values.flatten(0, 1):
        gradient.add_(micro_batch)
        counter.end_micro_batch()
    for part in (slice(0, 16), slice(16, 40)):  # as buckets are
        counter.finish(gradient, part)
    counter.restart()
    return gradient.clone()


def _tree(values):
    sums = values[:, 0].clone()
    for micro_batch in range(1, EACH):
        sums += values[:, micro_batch]
    return tree_add(sums, torch.empty(40))


@pytest.mark.parametrize("shards", (2, 4, 8))
def test_shards_are_added_as_a_tree(shards):
    gradient = torch.zeros(40)
    counter = ShardCounter(shards, EACH, lambda: [gradient])
    values = _micro_batches(shards)
    for _ in range(2):  # a second step begins anew
        assert same_bits(_counted(counter, gradient, values), _tree(values))
    assert not same_bits(values.flatten(0, 1).sum(0), _tree(values))
    assert [len(levels) for levels in counter._levels.values()] == [shards.bit_length() - 1]


def test_a_rank_that_has_half_of_the_shards_has_half_of_the_tree():
    values, nodes = _micro_batches(8), []
    for half in values.chunk(2):
        gradient = torch.zeros(40)
        nodes.append(_counted(ShardCounter(4, EACH, lambda gradient=gradient: [gradient]), gradient, half))
    assert same_bits(nodes[0] + nodes[1], _tree(values))


def test_a_buffer_that_appears_late_has_had_nothing_before():
    first, late = torch.zeros(40), torch.zeros(40)
    found = [first]
    counter = ShardCounter(4, 1, lambda: found)
    for number in range(4):
        if number == 2:
            found.append(late)
        first.add_(number + 1)
        if number >= 2:
            late.add_(number + 1)
        counter.end_micro_batch()
    for gradient in found:
        counter.finish(gradient)
    assert first.unique().tolist() == [10]
    assert late.unique().tolist() == [7]


def test_one_shard_keeps_nothing():
    gradient = torch.ones(40)
    counter = ShardCounter(1, 4, lambda: [gradient])
    counter.finish(gradient)
    counter.restart()
    assert gradient.unique().tolist() == [1]
    assert not counter._levels


def test_a_step_of_another_number_of_micro_batches_is_an_error():
    gradient = torch.zeros(40)
    counter = ShardCounter(2, 2, lambda: [gradient])
    counter.end_micro_batch()
    with pytest.raises(RuntimeError, match="a step had 1 complete shards instead of 2"):
        counter.restart()
    counter = ShardCounter(2, 1, lambda: [gradient])
    counter.end_micro_batch()
    counter.end_micro_batch()
    with pytest.raises(RuntimeError, match="more than 2 shards of 1 micro-batches"):
        counter.end_micro_batch()
