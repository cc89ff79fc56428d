"""Losses and other values of micro-batches: one sum for every number of data-parallel ranks."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import on_ranks, same_bits
from tp_invariant_recipes.numerics.mesh import VirtualMesh
from tp_invariant_recipes.numerics.step_values import summed

SHARDS, EACH = 4, 3


def _values():
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-9, 9, (SHARDS * EACH, 1), generator=generator)
    return torch.randn(SHARDS * EACH, 50, generator=generator) * 2.0**exponents


def _by_tree(mesh):
    mine = summed(_values().chunk(mesh.size)[mesh.rank], VirtualMesh(SHARDS, mesh.size, mesh.rank, mesh.group))
    if mesh.size > 1:
        dist.all_reduce(mine)  # as Bridge does
    return mine


def _by_the_library(mesh):
    mine = _values().chunk(mesh.size)[mesh.rank].sum(0)
    if mesh.size > 1:
        dist.all_reduce(mine)
    return mine


@pytest.mark.parametrize("size", (2, 4))
def test_the_sum_is_that_of_one_rank(size):
    (alone,) = on_ranks(1, 1, _by_tree)
    for whole in on_ranks(size, size, _by_tree):
        assert same_bits(whole, alone)
    assert torch.allclose(alone, _values().sum(0), rtol=1e-4)


def test_the_library_has_another():
    (alone,) = on_ranks(1, 1, _by_the_library)
    assert not same_bits(on_ranks(4, 4, _by_the_library)[0], alone)
