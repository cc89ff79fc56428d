"""Sums over data-parallel ranks: the tree, in pieces, where the ranks divide the buffer and where they do not."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import on_ranks, terms
from tests.operands import same_bits
from tp_invariant_recipes.kernels.tree_add import tree_add
from tp_invariant_recipes.numerics.sums import bucket_reduction

PIECES = (2**24, 16)  # all at once, and so few numbers that several pieces are on their way
SIZES = (2, 4, pytest.param(8, marks=pytest.mark.release), pytest.param(16, marks=pytest.mark.release))


def _scattered(mesh, numbers, piece):
    bucket_reduction.PIECE = piece
    mine = terms(mesh.size, numbers)[mesh.rank].clone()
    bucket_reduction.reduce_scatter([mine], mesh.group)
    return mine.chunk(mesh.size)[mesh.rank].clone()


def _reduced(mesh, numbers, piece):
    bucket_reduction.PIECE = piece
    mine = terms(mesh.size, numbers)[mesh.rank].clone()
    bucket_reduction.all_reduce([mine], mesh.group)
    return mine


def _by_the_library(mesh, numbers):
    mine = terms(mesh.size, numbers)[mesh.rank].clone()
    dist.all_reduce(mine, group=mesh.group)
    return mine


def _tree(size, numbers):
    return tree_add(terms(size, numbers), torch.empty(numbers))


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


CONTEXTS, DATA = 4, 2  # shards


def _of_contexts(mesh, cp, reduce, numbers, piece):
    """The sum of one rank's context shards, which are a tree over its data shards each; and of all ranks."""
    bucket_reduction.PIECE = piece
    dp, leaves = mesh.size // cp, terms(CONTEXTS * DATA, numbers).view(CONTEXTS, DATA, numbers)
    of_data, of_context = divmod(mesh.rank, cp)
    mine = leaves.chunk(cp)[of_context].chunk(dp, 1)[of_data]
    partials = [tree_add(item.contiguous(), torch.empty(numbers)) for item in mine]
    getattr(bucket_reduction, reduce)(partials, dist.group.WORLD, cp)
    return partials[0].chunk(mesh.size)[mesh.rank].clone() if reduce == "reduce_scatter" else partials[0]


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("size, cp", ((1, 1), (2, 1), (2, 2), (4, 2), pytest.param(8, 4, marks=pytest.mark.release)))
def test_context_shards_are_added_last(size, cp, piece):
    expected = _tree(CONTEXTS * DATA, 152)
    slices = on_ranks(size, size, _of_contexts, cp, "reduce_scatter", 152, piece)
    assert same_bits(torch.cat(slices), expected)
    for whole in on_ranks(size, size, _of_contexts, cp, "all_reduce", 151, piece):  # which no ranks divide
        assert same_bits(whole, _tree(CONTEXTS * DATA, 151))


def test_another_order_of_the_ranks_has_another_sum():
    """As data-parallel ranks alone they are added data shard by data shard."""
    others = on_ranks(4, 4, _of_contexts_as_data, 152)
    assert not any(same_bits(other, _tree(CONTEXTS * DATA, 152)) for other in others)


def _of_contexts_as_data(mesh, numbers):
    original = bucket_reduction._by_context
    bucket_reduction._by_context = lambda arrived, cp, copies: original(arrived, 1, 1)
    return _of_contexts(mesh, 2, "all_reduce", numbers, PIECES[0])


def test_the_library_adds_in_another_order():
    assert not same_bits(on_ranks(4, 4, _by_the_library, 150)[0], _tree(4, 150))
