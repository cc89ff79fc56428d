# SPDX-License-Identifier: Apache-2.0
"""Kernels' forms for a CPU: sums of rows, rows added to a sum, the experts' activation, and parts of all operands."""

import pytest
import torch
from torch.nn.functional import silu

from tests import kernel_table
from tests.operands import same_bits
from tp_invariant_recipes.kernels.activations import Clamped, weighted_activation, weighted_activation_backward
from tp_invariant_recipes.kernels.row_sums import add_rows, row_sum, token_sum


def test_order_decides_of_a_sum():
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


ALL = ("swiglu", "squared_relu", Clamped(1.702, 0.7, 1.0), Clamped(1.0, float("inf"), 0.5))


def _reference(x, p, kind):
    if isinstance(kind, Clamped):
        gate, up = x.chunk(2, -1)
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
        return gate * torch.sigmoid(kind.alpha * gate) * (up + kind.offset) * p.unsqueeze(1)
    if kind == "swiglu":
        gate, up = x.chunk(2, -1)
        return silu(gate) * up * p.unsqueeze(1)
    return x.relu() ** 2 * p.unsqueeze(1)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("kind", ALL, ids=str)
def test_it_and_its_gradients_are_those_of_autograd(kind, dtype):
    torch.manual_seed(0)
    x, p, dy = torch.randn(9, 64).to(dtype), torch.rand(9), torch.randn(9, 64 if kind == "squared_relu" else 32)
    wide, weight = x.double().requires_grad_(), p.double().requires_grad_()
    expected = _reference(wide, weight, kind)
    expected.backward(dy.to(dtype).double())
    error = 1e-6 if dtype == torch.float32 else 1e-2
    y = weighted_activation(x, p, kind)
    dx, dp = weighted_activation_backward(dy.to(dtype), x, p, kind)
    assert y.dtype == dx.dtype == dtype
    assert dp.dtype == torch.float32
    for result, correct in ((y, expected), (dx, wide.grad), (dp, weight.grad)):
        assert (result.double() - correct).norm() < error * correct.norm()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_parts_are_parts_of_the_whole(dtype):
    for row in kernel_table.sliced(large=False, dtype=dtype):
        row.check((2, 4))
