"""The examples of a step for each data-parallel rank. Megatron-Bridge is not imported."""

import pytest

from tp_invariant_recipes.numerics.megatron.data_order import ConsecutiveBatchSampler

STEPS = [[5, 3, 1, 0], [2, 7, 6, 4]]


@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_ranks_have_consecutive_examples_of_each_step(ranks):
    of_ranks = [list(ConsecutiveBatchSampler(STEPS, rank, ranks)) for rank in range(ranks)]
    assert [[n for part in parts for n in part] for parts in zip(*of_ranks, strict=True)] == STEPS


def test_ranks_that_do_not_divide_a_step_are_an_error():
    with pytest.raises(ValueError, match="3 ranks do not divide the 4 examples"):
        list(ConsecutiveBatchSampler(STEPS, 0, 3))
