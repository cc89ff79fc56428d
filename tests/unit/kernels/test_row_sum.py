"""Sums of a few rows: in the order given, in fp32, rounded once."""

import pytest
import torch

from tests.operands import same_bits
from tp_invariant_recipes.kernels.row_sums import row_sum, token_sum


def test_order_decides():
    big, small = 2.0**24, 1.0
    rows = torch.tensor([[big], [small], [-big]])
    assert row_sum(rows, torch.tensor([[0, 1, 2], [0, 2, 1]])).flatten().tolist() == [0.0, 1.0]


def test_terms_that_are_not_there_count_for_nothing():
    rows = torch.tensor([[float("nan")], [3.0]])
    assert row_sum(rows, torch.tensor([[1, -1], [-1, -1], [-1, 1]])).flatten().tolist() == [3.0, 0.0, 3.0]
    assert row_sum(rows[:0], torch.tensor([[-1, -1]])).flatten().tolist() == [0.0]


@pytest.mark.parametrize("terms", (1, 2, 8))
def test_it_rounds_once(terms):
    torch.manual_seed(0)
    rows, at = torch.randn(20, 33).bfloat16(), torch.randint(-1, 20, (7, terms))
    wide = row_sum(rows.float(), at)
    assert same_bits(row_sum(rows, at), wide.bfloat16())


def test_a_sum_of_tokens_begins_at_plus_zero():
    assert not token_sum(torch.full((2, 3), -0.0), 1).signbit().any()
