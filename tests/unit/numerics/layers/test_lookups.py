"""Gradients of lookups beside a weight's main gradient."""

import pytest
import torch

from tp_invariant_recipes.numerics.layers import embedding


def weight_with_main_grad():
    weight = torch.nn.Parameter(torch.randn(8, 4))
    weight.main_grad = torch.zeros(8, 4)
    return weight


@pytest.mark.parametrize("ahead", (True, False))
def test_each_lookup_tells_megatron_that_the_weight_has_a_gradient(ahead):
    """Also one of multi-token prediction alone, as on a last pipeline stage with an embedding of its own."""
    weight = weight_with_main_grad()
    embedding.lookup(weight, torch.tensor([[1, 3]]), None, ahead=ahead).sum().backward()
    assert weight.grad is not None
    assert weight.grad_added_to_main_grad
    rows = weight.main_grad + sum(embedding.sums_of_their_own(weight))[0] if ahead else weight.main_grad
    assert rows.sum(1).tolist() == [0, 4, 0, 4, 0, 0, 0, 0]


def test_lookups_ahead_are_added_before_the_others():
    """The order is part of the modes' definition."""
    weight = weight_with_main_grad()
    for name in (embedding.LOOKUPS, embedding.AHEAD):
        setattr(weight, name, torch.full((1, 8, 4), float(name == embedding.AHEAD)))
    assert [kept.mean().item() for kept in embedding.sums_of_their_own(weight)] == [1.0, 0.0]
