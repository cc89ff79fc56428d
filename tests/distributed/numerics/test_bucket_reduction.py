"""Sums over data-parallel ranks: the tree, in pieces, where the ranks divide the buffer and where they do not."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import on_ranks, same_bits
from tp_invariant_recipes.kernels.tree_add import tree_add
from tp_invariant_recipes.numerics import bucket_reduction

PIECES = (2**24, 16)  # all at once, and so few numbers that several pieces are on their way
SIZES = (2, 4, pytest.param(8, marks=pytest.mark.release), pytest.param(16, marks=pytest.mark.release))


def _partials(size, numbers):
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-12, 12, (size, 1), generator=generator)
    return torch.randn(size, numbers, generator=generator) * 2.0**exponents


def _scattered(mesh, numbers, piece):
    bucket_reduction.PIECE = piece
    mine = _partials(mesh.size, numbers)[mesh.rank].clone()
    bucket_reduction.reduce_scatter(mine, mesh.group)
    return mine.chunk(mesh.size)[mesh.rank].clone()


def _reduced(mesh, numbers, piece):
    bucket_reduction.PIECE = piece
    mine = _partials(mesh.size, numbers)[mesh.rank].clone()
    bucket_reduction.all_reduce(mine, mesh.group)
    return mine


def _by_the_library(mesh, numbers):
    mine = _partials(mesh.size, numbers)[mesh.rank].clone()
    dist.all_reduce(mine, group=mesh.group)
    return mine


def _tree(size, numbers):
    return tree_add(_partials(size, numbers), torch.empty(numbers))


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("size", SIZES)
def test_each_rank_has_its_slice_of_the_tree(size, piece):
    slices = on_ranks(size, size, _scattered, size * 37, piece)
    assert same_bits(torch.cat(slices), _tree(size, size * 37))


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("size, numbers", ((2, 37), (4, 150), (4, 3), pytest.param(16, 77, marks=pytest.mark.release)))
def test_every_rank_has_the_tree(size, numbers, piece):
    for whole in on_ranks(size, size, _reduced, numbers, piece):
        assert same_bits(whole, _tree(size, numbers))


def test_the_library_adds_in_another_order():
    assert not same_bits(on_ranks(4, 4, _by_the_library, 150)[0], _tree(4, 150))
