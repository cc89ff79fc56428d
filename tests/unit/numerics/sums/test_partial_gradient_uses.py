"""Gradients of a weight that several sequences of a packed row use in one backward pass."""

import pytest
import torch

from tp_invariant_recipes.numerics.sums import weight_gradient
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh


def _waiting(weight, value, leaves):
    values = torch.zeros(2, leaves, 3)
    values[0, 0] = value
    return weight_gradient._Waiting(weight, values, VirtualMesh(2, 1, 0), True, False)


def _summed(*uses):
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.main_grad = torch.zeros(3)
    weight_gradient._waiting[7] = [_waiting(weight, *use) for use in uses]
    weight_gradient._finish(7)
    return weight.main_grad.tolist()


def test_uses_are_added_in_their_order_whatever_their_lengths():
    """Sequences of 4, 2 and 1 leaves; one after the other leaves the 1, which the other order loses."""
    assert _summed((1e8, 4), (-1e8, 2), (1.0, 1)) == [1.0] * 3
    assert _summed((1.0, 1), (-1e8, 2), (1e8, 4)) == [0.0] * 3


def test_no_addition_names_a_buffer_twice(monkeypatch):
    """A GPU adds the tensors of a list at once: two additions to one buffer would be a race."""
    lists, add = [], torch._foreach_add_

    def noting(to, *args):
        lists.append([tensor.data_ptr() for tensor in to])
        return add(to, *args)

    monkeypatch.setattr(torch, "_foreach_add_", noting)
    _summed((1.0, 1), (2.0, 1), (3.0, 1))
    assert len(lists) == 3
    assert all(len(set(item)) == len(item) for item in lists)


def test_what_a_failed_pass_has_left_is_added_to_no_other():
    from tp_invariant_recipes.numerics.megatron.data_parallel import ending_a_micro_batch

    weight = torch.nn.Parameter(torch.zeros(3))
    weight.main_grad = torch.zeros(3)

    def failing():
        weight_gradient._waiting[7] = [_waiting(weight, 1.0, 1)]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ending_a_micro_batch(failing)()
    weight_gradient.finish_all()
    assert not weight.main_grad.any()
