# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks, whose other ranks are given here. Gradients of a weight that several sequences of a packed row use
in one backward pass.
"""

import pytest
import torch

from tests.operands import same_bits
from tp_invariant_recipes.numerics.sums import step_values, tree, weight_gradient
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh


@pytest.fixture
def of_ranks(monkeypatch):
    """Every rank has what this one has."""
    monkeypatch.setattr(tree, "all_gather", lambda node, mesh: node.repeat(mesh.size, *[1] * (node.dim() - 1)))


def test_nodes_of_ranks_are_rounded_once(monkeypatch):
    """In bf16 1 + 2^-8 is 1, and 1 + 2^-7 is a number: the other rank has another 2^-8."""
    first, last = torch.tensor([[1.0], [2.0**-8]]), torch.tensor([[2.0**-8], [0.0]])
    node = tree.tree_sum(last).unsqueeze(0)
    monkeypatch.setattr(tree, "all_gather", lambda own, mesh: torch.cat([own, node.to(own.dtype)]))
    two = tree.tree_all_reduce(first, VirtualMesh(4, 2, 0), torch.bfloat16)
    single = tree.tree_all_reduce(torch.cat([first, last]), VirtualMesh(4, 1, 0), torch.bfloat16)
    assert same_bits(two, single)
    assert single.item() == 1.0 + 2.0**-7


@pytest.mark.parametrize("data, context", ((0, 0), (1, 0), (0, 1), (1, 1)))
def test_the_first_rank_alone_has_the_sum(of_ranks, data, context):
    """The others have zeros, also those of a context: Megatron adds up what all ranks have."""
    values = torch.ones(2, 1, 3)
    total = step_values.summed(values, VirtualMesh(2, 2, data), VirtualMesh(2, 2, context))
    assert total.tolist() == [0.0 if data or context else 8.0] * 3


def _waiting(weight, value, leaves):
    values = torch.zeros(2, leaves, 3)
    values[0, 0] = value
    return weight_gradient._Leaves(weight, values, VirtualMesh(2, 1, 0), True, False)


def _summed(*uses):
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.main_grad = torch.zeros(3)
    weight_gradient._finish([_waiting(weight, *use) for use in uses])
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
        weight_gradient._waiting._of_pass[7] = [_waiting(weight, 1.0, 1)]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ending_a_micro_batch(failing)()
    weight_gradient.finish_all()
    assert not weight.main_grad.any()
