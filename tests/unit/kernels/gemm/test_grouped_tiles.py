"""Tiles of grouped rows: each of one group, all rows in some tile; and those of a CUDA graph, which knows no sizes."""

import pytest
import torch

from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups

SIZES = ((70, 0, 1, 130), (0, 0, 5, 0), (64, 128, 0, 64), (1, 1, 1, 1))


def tiles(groups, height):
    return [(g, start) for g, start in zip(*(x.tolist() for x in groups.tiles(height)), strict=True)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("height", (16, 64))
def test_tiles_have_all_rows_of_one_group_each(sizes, height):
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    expected = [(n, starts[n] + row) for n, size in enumerate(sizes) for row in range(0, size, height)]
    assert tiles(Groups(sizes, torch.tensor(sizes)), height) == expected
    captured = tiles(Groups((), torch.tensor(sizes), sum(sizes)), height)
    assert captured[: len(expected)] == expected
    assert all(start >= starts[n] + sizes[n] for n, start in captured[len(expected) :])


def test_no_more_rows_are_read_than_there_are():
    groups = Groups((), torch.tensor((3, 5, 4)), 9)
    assert groups.ends.tolist() == [3, 8, 9]
    assert Groups((3, 5, 4), groups.counts).ends.tolist() == [3, 8, 12]


def test_a_graph_has_tiles_for_any_sizes():
    """As many as rows can need: one group with all, and each with a row."""
    counts = (len(tiles(Groups((), torch.tensor(sizes), 200), 64)) for sizes in ((200, 0, 0), (66, 67, 67)))
    assert [*counts] == [6, 6]
    assert len(tiles(Groups((66, 67, 67), torch.tensor((66, 67, 67))), 64)) == 6
