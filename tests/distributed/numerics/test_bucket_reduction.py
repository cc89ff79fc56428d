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
NUMBERS = (37, 150, 3)
CONTEXTS, DATA = 4, 2  # shards
LEAVES = CONTEXTS * DATA


def _reduced(mesh, reduce, numbers):
    mine = terms(mesh.size, numbers)[mesh.rank].clone()
    getattr(bucket_reduction, reduce)([mine], mesh.group)
    return mine.chunk(mesh.size)[mesh.rank].clone() if reduce == "reduce_scatter" else mine


def _of_contexts(mesh, cp, reduce, numbers):
    """The sum of one rank's context shards, which are a tree over its data shards each; and of all ranks."""
    dp, leaves = mesh.size // cp, terms(LEAVES, numbers).view(CONTEXTS, DATA, numbers)
    of_data, of_context = divmod(mesh.rank, cp)
    mine = leaves.chunk(cp)[of_context].chunk(dp, 1)[of_data]
    partials = [tree_add(item.contiguous(), torch.empty(numbers)) for item in mine]
    getattr(bucket_reduction, reduce)(partials, dist.group.WORLD, cp)
    return partials[0].chunk(mesh.size)[mesh.rank].clone() if reduce == "reduce_scatter" else partials[0]


def _all_sums(mesh, piece):
    bucket_reduction.PIECE = piece
    return (
        _reduced(mesh, "reduce_scatter", mesh.size * 37),
        {numbers: _reduced(mesh, "all_reduce", numbers) for numbers in NUMBERS},
    )


def _all_contexts(mesh, cp, piece):
    bucket_reduction.PIECE = piece
    return _of_contexts(mesh, cp, "reduce_scatter", 152), _of_contexts(mesh, cp, "all_reduce", 151)


def _controls(mesh):
    """The library's sum; and that of ranks that add data shard by data shard, as data-parallel ranks alone do."""
    by_library = terms(mesh.size, 150)[mesh.rank].clone()
    dist.all_reduce(by_library, group=mesh.group)
    original = bucket_reduction._by_context
    bucket_reduction._by_context = lambda arrived, cp, copies: original(arrived, 1, 1)
    return by_library, _of_contexts(mesh, 2, "all_reduce", 152)


def _tree(size, numbers):
    return tree_add(terms(size, numbers), torch.empty(numbers))


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_has_the_tree_or_its_slice_of_it(size, piece):
    slices, wholes = zip(*on_ranks(size, size, _all_sums, piece), strict=True)
    assert same_bits(torch.cat(slices), _tree(size, size * 37))
    for numbers in NUMBERS:
        assert all(same_bits(whole[numbers], _tree(size, numbers)) for whole in wholes)


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("size, cp", ((1, 1), (2, 1), (2, 2), (4, 2), pytest.param(8, 4, marks=pytest.mark.release)))
def test_context_shards_are_added_last(size, cp, piece):
    slices, wholes = zip(*on_ranks(size, size, _all_contexts, cp, piece), strict=True)
    assert same_bits(torch.cat(slices), _tree(LEAVES, 152))
    assert all(same_bits(whole, _tree(LEAVES, 151)) for whole in wholes)  # which no ranks divide


def test_the_library_and_another_order_of_the_ranks_have_other_sums():
    for by_library, as_data in on_ranks(4, 4, _controls):
        assert not same_bits(by_library, _tree(4, 150))
        assert not same_bits(as_data, _tree(LEAVES, 152))
