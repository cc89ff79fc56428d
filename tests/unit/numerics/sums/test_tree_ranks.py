"""Sums over ranks, whose other ranks are given here."""

import pytest
import torch

from tests.operands import same_bits
from tp_invariant_recipes.numerics.sums import step_values, tree
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
