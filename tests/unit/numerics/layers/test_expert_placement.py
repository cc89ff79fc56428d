"""Every expert has one rank that computes it, which holds its weights."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.numerics.layers.experts.expert_placement import Owners, fits

DEGREES = st.sampled_from((1, 2, 4, 8))


class Group:
    def __init__(self, size, rank=0):
        self.size, self.rank = lambda: size, lambda: rank


def _ranks(tp, ep, experts):
    """The Owners of all ranks that share tokens, as Megatron numbers them."""
    size = max(tp, ep)
    config = SimpleNamespace(
        num_moe_experts=experts, tensor_model_parallel_size=tp, context_parallel_size=1, expert_model_parallel_size=ep
    )
    with patch("megatron.core.parallel_state.get_data_parallel_world_size", return_value=size // tp):
        return [Owners.from_config(config, Group(tp, rank % tp), Group(ep, rank % ep)) for rank in range(size)]


@given(tp=DEGREES, ep=DEGREES, each=st.integers(1, 3))
def test_experts_are_divided(tp, ep, each):
    experts = max(tp, ep) * each
    ranks = _ranks(tp, ep, experts)
    order = ranks[0].by_owner(torch.arange(experts))
    assert torch.equal(ranks[0].by_number(order), torch.arange(experts))
    for number, owners in enumerate(ranks):
        assert owners.rank == number
        assert owners.sources == max(1, ep // tp) == len(owners.chain)
        first = number % ep * (experts // ep) + number // ep * each
        assert order[number * owners.each :][: owners.each].tolist() == list(range(first, first + owners.each))
        held = range(number % ep * (experts // ep), (number % ep + 1) * (experts // ep))
        assert first in held
        assert first + owners.each - 1 in held
        assert owners.first_local == first - held[0]


@pytest.mark.parametrize("tp, ep, experts", ((2, 3, 12), (4, 4, 6), (3, 2, 12), (2, 4, 2)))
def test_what_does_not_divide_is_refused(tp, ep, experts):
    with pytest.raises(ConfigError, match=f"tp={tp} and ep={ep}: one must divide the other, both {experts} experts"):
        _ranks(tp, ep, experts)


@pytest.mark.parametrize(
    "experts, tp, ep, fit", ((8, 4, 2, True), (6, 4, 2, False), (6, 2, 4, False), (6, 3, 2, False), (6, 2, 6, True))
)
def test_each_expert_has_an_owner_where_both_degrees_divide_them(experts, tp, ep, fit):
    assert fits(experts, tp, ep) is fit
