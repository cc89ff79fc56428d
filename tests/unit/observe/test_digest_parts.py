# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks: whether parts are the whole of a tensor, whether replicas agree, and who holds what. Where a rank's
part of a parameter lies: any cut of a tensor, described as Megatron does, covers it exactly once. The last bit
moved at random.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tp_invariant_recipes.kernels.digest import LANES
from tp_invariant_recipes.kernels.launch import TablePlace
from tp_invariant_recipes.numerics.gemm.cublas import tried, trying
from tp_invariant_recipes.observe import union
from tp_invariant_recipes.observe.digests.sums import coefficients, covers, extent, fits, is_whole
from tp_invariant_recipes.observe.dithering import Dither, dithered
from tp_invariant_recipes.observe.shards import _OwnerView, _table, _within, whole_name

WRONG = (
    lambda places, n: places[:n] + places[n + 1 :],
    lambda places, n: [*places, places[n]],
    lambda places, n: [*places[:n], places[n]._replace(column=places[n].column + 1), *places[n + 1 :]],
    lambda places, n: [*places[:n], places[n]._replace(columns=places[n].columns - 1), *places[n + 1 :]],
)


@st.composite
def cut_tables(draw):
    """Rows and columns of a table, and slices that are the whole of it: every `step`th row, columns cut in two."""
    rows, columns = draw(st.integers(1, 4)) * draw(st.sampled_from([1, 2, 3])), draw(st.integers(2, 50))
    step = draw(st.sampled_from([n for n in (1, 2, 3) if rows % n == 0]))
    cuts = sorted({0, columns, draw(st.integers(0, columns))})
    return (rows, columns), [
        TablePlace(first, step, rows // step, start, end - start)
        for first in range(step)
        for start, end in itertools.pairwise(cuts)
    ]


def whole(places, shape) -> bool:
    inside = all(fits(place, shape) for place in places)
    sums = np.sum([extent(place, shape[1]) for place in places] or [[0] * 4], axis=0)
    return inside and is_whole(sums.tolist(), shape[0] * shape[1])


@given(cut_tables(), st.data())
def test_parts_are_the_whole_of_a_tensor_exactly_if_each_element_is_held_once(table, data):
    shape, places = table
    assert whole(places, shape)
    assert covers(places, shape)
    n = data.draw(st.integers(0, len(places) - 1))
    damaged = data.draw(st.sampled_from(WRONG))(places, n)
    assert not whole(damaged, shape)
    assert not covers(damaged, shape)


def test_both_sums_must_be_those_of_the_whole():
    """Either alone is equal for other parts once in 2^61 times."""
    sums, others = extent(TablePlace(0, 1, 1, 0, 6), 6), extent(TablePlace(0, 1, 1, 1, 6), 6)
    mixed = (sums, sums[:2] + others[2:], others[:2] + sums[2:])
    assert [is_whole(tried, 6) for tried in mixed] == [True, False, False]


@pytest.mark.parametrize("count", (2, 3, 4, 5, 64))
@pytest.mark.parametrize("difference", (1, 2**32, 2**63, -1))
def test_any_one_replica_that_differs_is_detected(count, difference):
    keys = union.keys_of(["part"])
    factors = np.array([coefficients(keys, np.array([count]), np.array([n]))[0] for n in range(count)], dtype=np.uint64)
    assert (factors.sum(0, dtype=np.uint64) == 0).all()
    assert (factors % 2).any(1).all()  # so that what is multiplied by it is 0 for 0 alone
    lanes = np.tile(np.array([12345, 2**63 + 7], dtype=np.uint64), (count, 1))
    assert not (factors * lanes).sum(0, dtype=np.uint64).any()
    for rank in range(count):
        other = lanes.copy()
        other[rank] += np.uint64(difference % 2**64)
        assert (factors * other).sum(0, dtype=np.uint64).any()


def test_a_part_of_one_rank_is_compared_with_nothing():
    assert coefficients(union.keys_of(["part"]), np.array([1]), np.array([0])).tolist() == [[0] * LANES]


@settings(max_examples=20)
@given(st.lists(st.lists(st.sampled_from("abcdef"), unique=True, max_size=4), min_size=1, max_size=9), st.data())
def test_who_holds_what_is_what_a_search_finds(ranks, data):
    rank = data.draw(st.integers(0, len(ranks) - 1))
    table = np.zeros((len(ranks), 4), dtype=np.int64)
    for n, texts in enumerate(ranks):
        table[n, : len(texts)] = union.keys_of(texts)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(union, "_RANKS", 2)
        count, before = union.holders(table, union.keys_of(ranks[rank]), rank)
    assert count.tolist() == [sum(text in rank for rank in ranks) for text in ranks[rank]]
    assert before.tolist() == [sum(text in rank for rank in ranks[:rank]) for text in ranks[rank]]


@pytest.mark.parametrize(
    "key, indices, name",
    (
        ("decoder.layers.mlp.linear_fc1.weight", (3,), "decoder.layers.3.mlp.linear_fc1.weight"),
        ("decoder.layers.mlp.experts.experts.fc1.weight", (3, 7), "decoder.layers.3.mlp.experts.7.fc1.weight"),
        ("decoder.layers.3.mlp.experts.experts.fc1.weight", (7,), "decoder.layers.3.mlp.experts.7.fc1.weight"),
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
        (PLACES, (4, 4), True), (PLACES, (4, 5), False),
        ([PLACES[0], TablePlace(1, 1, 2, 0, 4)], (4, 4), False),  # as many elements, but an overlap and a gap
        ([TablePlace(0, 1, 1, 0, 3), TablePlace(0, 1, 1, 3, 2)], (5,), True),
        ([TablePlace(0, 1, 1, 0, 1)], (), True), ([], (0, 3), True),
    ),
)  # fmt: skip
def test_what_covers_a_shape(places, shape, covered):
    assert all(fits(place, shape) for place in places) or not covered
    assert covers(places, shape) is covered


@pytest.mark.parametrize("dtype, integers", ((torch.bfloat16, torch.int16), (torch.float32, torch.int32)))
def test_every_number_moves_by_one_ulp_and_what_is_none_stays(dtype, integers):
    x = torch.randn(4096).to(dtype)
    special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), torch.finfo(dtype).max]).to(dtype)
    moved = dithered(torch.cat([x, special]), torch.Generator().manual_seed(1))
    steps = moved[:4096].view(integers) - x.view(integers)
    assert set(steps.tolist()) == {-1, 1}
    assert abs(steps.float().mean()) < 0.1
    assert torch.equal(moved[4096:-1].view(integers), special[:-1].view(integers))
    assert torch.isfinite(moved[-1])


def test_outputs_and_gradients_of_modules_move_until_the_hooks_are_off():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(4, 8)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        out = model(x)
        out.square().sum().backward()
        return out.detach(), model[0].weight.grad.clone()

    plain = run()
    dither = Dither([model], seed=3)
    moved = run()
    dither.unhook()
    assert all(torch.equal(a, b) for a, b in zip(plain, run(), strict=True))
    for a, b in zip(plain, moved, strict=True):
        assert not torch.equal(a, b)
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_what_a_trial_calls_does_not_move():
    """Attention is tried on a layer of the model; Muon changes a setting, so that a later pass tries it once more."""
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    plain = model(x)
    dither = Dither([model], seed=3)
    assert tried({}, ("kind",), x, lambda: torch.equal(model(x), plain))
    assert not torch.equal(model(x), plain)
    with pytest.raises(ZeroDivisionError):
        tried({}, ("kind",), x, lambda: 1 // 0)
    assert not trying()
    dither.unhook()
