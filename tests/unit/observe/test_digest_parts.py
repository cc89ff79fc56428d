"""Sums over ranks: whether parts are the whole of a tensor, whether replicas agree, and who holds what."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_invariant_recipes.kernels.digest import LANES
from tp_invariant_recipes.kernels.launch import TablePlace
from tp_invariant_recipes.observe import union
from tp_invariant_recipes.observe.digests.sums import coefficients, extent, fits, is_whole
from tp_invariant_recipes.observe.shards import covers

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


@pytest.mark.parametrize("shape, place", (((), TablePlace(0, 1, 1, 0, 1)), ((7168,), TablePlace(0, 1, 1, 0, 7168))))
def test_a_number_and_a_row_are_tables(shape, place):
    assert fits(place, shape)
    assert is_whole(extent(place, place.columns), place.columns)


def test_both_sums_must_be_those_of_the_whole():
    """Either alone is equal for other parts once in 2^61 times."""
    sums, others = extent(TablePlace(0, 1, 1, 0, 6), 6), extent(TablePlace(0, 1, 1, 1, 6), 6)
    assert [is_whole(tried, 6) for tried in (sums, sums[:2] + others[2:], others[:2] + sums[2:])] == [
        True,
        False,
        False,
    ]


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
