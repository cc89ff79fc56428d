"""Tiles of grouped products where the host does not know the sizes: those that it would make, then some of no rows."""

import pytest
import torch

from tp_invariant_recipes.kernels.products.grouped_product import Groups

SIZES = ((3, 0, 5), (0, 0, 9), (1, 1, 1, 1), (8, 4, 0, 0), (0, 0, 0, 0, 17), (0,))


@pytest.mark.parametrize("height", (1, 4, 128))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tiles_of_unknown_sizes_are_the_same(sizes, height):
    counts = torch.tensor(sizes)
    group, first = Groups(sizes, counts).tiles(height)
    unknown = Groups((0,) * len(sizes), counts, sum(sizes))
    groups, starts = unknown.tiles(height)
    assert torch.equal(groups[: len(group)], group)
    assert torch.equal(starts[: len(group)], first)
    assert (starts[len(group) :] >= unknown.ends[groups[len(group) :]]).all()
    assert len(groups) == sum(sizes) // height + min(sum(sizes), len(sizes))
