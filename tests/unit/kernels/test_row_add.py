"""Rows added to rows of a sum: one after the other, in fp32."""

import pytest
import torch

from tests.operands import same_bits
from tp_invariant_recipes.kernels.row_sums import add_rows


def added_in_turn(rows, at, out):
    out = out.clone()
    for row, number in zip(rows, at.tolist(), strict=True):
        if number >= 0:
            out[number] += row.float()
    return out


def test_order_decides():
    big, small = 2.0**24, 1.0
    for rows, total in (((big, small, -big), 0.0), ((big, -big, small), 1.0)):
        out = torch.zeros(2, 1)
        add_rows(torch.tensor(rows).view(3, 1), torch.tensor([1, 1, 1]), out)
        assert out.flatten().tolist() == [0.0, total]


def test_a_second_batch_goes_on_where_the_first_ended():
    out = torch.tensor([[2.0**24]])
    add_rows(torch.ones(2, 1), torch.tensor([0, 0]), out)
    assert out.item() == 2.0**24


def test_a_second_batch_at_once_is_one_addition():
    out = torch.tensor([[2.0**24]])
    add_rows(torch.ones(2, 1), torch.tensor([0, 0]), out, at_once=True)
    assert out.item() == 2.0**24 + 2


@pytest.mark.parametrize("at_once", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_many(dtype, at_once):
    torch.manual_seed(0)
    rows, at, out = torch.randn(300, 33).to(dtype), torch.randint(-3, 40, (300,)), torch.randn(50, 33)
    looped = added_in_turn(rows, at, out)
    combined = out + added_in_turn(rows, at, torch.zeros_like(out))
    assert not same_bits(looped, combined)
    expected = combined if at_once else looped
    add_rows(rows, at, out, at_once)
    assert same_bits(out, expected)
    add_rows(rows[:0], at[:0], out, at_once)
    assert same_bits(out, expected)
