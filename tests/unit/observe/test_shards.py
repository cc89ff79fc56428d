"""Where a rank's part of a parameter lies: any cut of a tensor, described as Megatron does, covers it exactly once."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tp_invariant_recipes.kernels.launch import TablePlace
from tp_invariant_recipes.observe.shards import _OwnerView, _table, _within, covers, whole_name


@pytest.mark.parametrize(
    "key, indices, name",
    (
        ("decoder.layers.mlp.linear_fc1.weight", (3,), "decoder.layers.3.mlp.linear_fc1.weight"),
        (
            "decoder.layers.mlp.experts.experts.linear_fc1.weight",
            (3, 7),
            "decoder.layers.3.mlp.experts.7.linear_fc1.weight",
        ),
        (
            "decoder.layers.3.mlp.experts.experts.linear_fc1.weight",
            (7,),
            "decoder.layers.3.mlp.experts.7.linear_fc1.weight",
        ),
        ("decoder.layers.3.mixer.in_proj.weight.z", (), "decoder.layers.3.mixer.in_proj.weight.z"),
        ("output_layer.weight", (), "output_layer.weight"),
        ("something.weight", (4,), "something.weight.4"),
    ),
)
def test_names_have_the_numbers_of_prepended_axes(key, indices, name):
    assert whole_name(key, indices) == name


@given(rows=st.integers(1, 6), columns=st.integers(1, 6), data=st.data())
def test_any_range_of_a_flat_gradient_is_cut_into_blocks_that_cover_it(rows, columns, data):
    """As a distributed optimizer owns them: the blocks of all ranges together are the part, each element once."""
    gap = data.draw(st.integers(0, 3))
    offset = data.draw(st.integers(0, 4))
    stride = columns + gap
    owner = torch.arange(offset + rows * stride, dtype=torch.float32)
    part = _OwnerView("w", (20, 20), owner, offset, stride, TablePlace(5, 1, rows, 7, columns))
    edges = data.draw(st.lists(st.integers(0, owner.numel()), max_size=3).map(sorted))
    edges = [0, *edges, owner.numel()]
    blocks = [block for start, end in itertools.pairwise(edges) for block in _within(part, start, end)]
    whole = _table(owner, part.offset, part.stride, part.place)
    seen = torch.zeros(rows, columns)
    for block in blocks:
        place = block.place
        values = _table(owner, block.offset, block.stride, place)
        here = (
            slice(place.row - 5, place.row - 5 + place.rows),
            slice(place.column - 7, place.column - 7 + place.columns),
        )
        assert torch.equal(values, whole[here])
        seen[here] += 1
    assert (seen == 1).all()
    for start, end in itertools.pairwise(edges):
        assert len(list(_within(part, start, end))) <= 3


PLACES = [TablePlace(0, 1, 2, 0, 4), TablePlace(2, 1, 2, 0, 4)]


@pytest.mark.parametrize(
    "places, shape, covered",
    (
        (PLACES, (4, 4), True),
        (PLACES[:1], (4, 4), False),  # a lost shard
        ([*PLACES, PLACES[0]], (4, 4), False),  # one twice
        ([PLACES[0], TablePlace(1, 1, 2, 0, 4)], (4, 4), False),  # as many elements, but an overlap and a gap
        (PLACES, (4, 5), False),
        ([TablePlace(0, 1, 2, 0, 4), TablePlace(2, 1, 2, 1, 4)], (4, 4), False),  # beyond the edge
        ([TablePlace(0, 1, 1, 0, 3), TablePlace(0, 1, 1, 3, 2)], (5,), True),
        ([TablePlace(0, 1, 1, 0, 1)], (), True),
        ([], (0, 3), True),
    ),
)
def test_what_covers_a_shape(places, shape, covered):
    assert covers(places, shape) is covered
