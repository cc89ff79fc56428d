# SPDX-License-Identifier: Apache-2.0
"""Digest lanes: what they are, that parts add up to the whole, and that every difference shows."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.operands import same_bits
from tp_invariant_recipes.kernels import digest
from tp_invariant_recipes.kernels.digest import LANES, Lanes, keys, lanes
from tp_invariant_recipes.kernels.grad_norm import largest
from tp_invariant_recipes.kernels.launch import TensorPart

MASK = (1 << 64) - 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64)


def random_bits(rows, columns, dtype=torch.float32, seed=0):
    size = torch.empty((), dtype=dtype).element_size()
    noise = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 256, (rows * columns * size,), dtype=torch.uint8, generator=noise)
        .view(dtype)
        .view(rows, columns)
    )


def lanes_of_all(values):
    return lanes([TensorPart(values, 0, 0)])[0].tolist()


def test_lanes_are_the_sum_that_their_description_says():
    values = random_bits(5, 7)
    words = values.view(torch.int32).tolist()
    all_keys = keys(7, torch.device("cpu"))
    rows, columns = all_keys.rows.numpy().view(np.uint32).tolist(), all_keys.columns.numpy().view(np.uint64).tolist()
    sums = [
        sum((words[r][c] & 0xFFFFFFFF) * rows[r][lane] * columns[c][lane] for r in range(5) for c in range(7)) & MASK
        for lane in range(LANES)
    ]
    assert [lane & MASK for lane in lanes_of_all(values)] == sums


def test_keys_are_odd_and_do_not_depend_on_how_many_there_are():
    few, many = keys(3, torch.device("cpu")), keys(5000, torch.device("cpu"))
    for short, long in zip(few, many, strict=True):
        assert (long & 1 == 1).all()
        assert torch.equal(short, long[: len(short)])
        assert len({tuple(row) for row in long.tolist()}) == len(long)


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    cuts=st.tuples(st.sets(st.integers(1, 8), max_size=3), st.sets(st.integers(1, 8), max_size=3)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_parts_add_up_to_the_whole(rows, columns, cuts, dtype, seed):
    values = random_bits(rows, columns, dtype, seed)
    at = [
        sorted({0, size, *(cut for cut in key if cut < size)}) for size, key in zip((rows, columns), cuts, strict=True)
    ]
    pieces = [
        TensorPart(values[top:bottom, start:end], top, start)
        for (top, bottom), (start, end) in itertools.product(*(itertools.pairwise(edges) for edges in at))
    ]
    assert lanes(pieces).sum(0).tolist() == lanes_of_all(values)


@given(rows=st.integers(1, 12), step=st.integers(1, 4), dtype=st.sampled_from(DTYPES))
def test_every_nth_row_is_a_piece(rows, step, dtype):
    values = random_bits(rows, 3, dtype)
    pieces = [TensorPart(values[first::step], first, 0, step) for first in range(min(step, rows))]
    assert lanes(pieces).sum(0).tolist() == lanes_of_all(values)


@given(
    dtype=st.sampled_from(DTYPES),
    row=st.integers(0, 5),
    column=st.integers(0, 6),
    bit=st.integers(0, 63),
    seed=st.integers(0, 99),
)
def test_any_flipped_bit_shows_in_both_lanes(dtype, row, column, bit, seed):
    values = random_bits(6, 7, dtype, seed)
    changed = values.clone()
    size = values.element_size()
    bit %= 8 * size
    bytes_ = changed.view(torch.uint8).view(6, 7, size)
    bytes_[row, column, bit // 8] ^= 1 << bit % 8
    assert not same_bits(changed, values)
    assert all(a != b for a, b in zip(lanes_of_all(values), lanes_of_all(changed), strict=True))


@pytest.mark.parametrize("lane", range(LANES))
def test_a_change_that_one_lane_cannot_see_shows_in_the_other(lane):
    """Two rows change by each other's key in that lane, so that their products with the keys cancel."""
    all_keys = keys(4, torch.device("cpu"))
    first, second = (all_keys.rows.numpy().view(np.uint32)[row].tolist() for row in (1, 3))
    values = torch.zeros(4, 2, dtype=torch.int32)
    changed = values.clone()
    words = changed.numpy().view(np.uint32)
    values.numpy().view(np.uint32)[3, 1] = first[lane]
    words[1, 1] = second[lane]
    same = [a == b for a, b in zip(lanes_of_all(values), lanes_of_all(changed), strict=True)]
    assert same == [number == lane for number in range(LANES)]


def test_no_key_is_that_of_the_other_lane():
    for key in keys(5000, torch.device("cpu")):
        assert not set(key[:, 0].tolist()) & set(key[:, 1].tolist())


@given(st.permutations(range(12)))
def test_any_other_order_of_elements_shows(order):
    values = torch.arange(12, dtype=torch.float32).view(3, 4)
    moved = values.flatten()[list(order)].view(3, 4)
    assert (lanes_of_all(values) == lanes_of_all(moved)) == same_bits(values, moved)


def test_signs_alone_show():
    values = random_bits(64, 64).abs()
    for seed in range(50):
        key = torch.rand(64, 64, generator=torch.Generator().manual_seed(seed)) < 0.5
        assert lanes_of_all(values) != lanes_of_all(torch.where(key, -values, values))


def test_memory_is_read_anew_and_the_largest_detected():
    values = random_bits(4, 4).nan_to_num(0, 1, 1)
    taken = Lanes([TensorPart(values, 0, 0)], magnitude=True)
    before = taken().clone()
    values[3, 3] = float("inf")
    assert (taken() != before).all()
    assert taken.largest.item() == largest([values]).item() == 0x7F800000


@given(seed=st.integers(0, 99), wrong=st.integers(0, 6), chunk=st.sampled_from((8, 1 << 20)))
def test_copies_that_are_not_the_values_rounded_are_counted(seed, wrong, chunk):
    """In parts, too."""
    values = random_bits(6, 7, seed=seed)
    copy = values.to(torch.bfloat16)
    for at in range(wrong):
        copy.view(-1)[at] = 1.0 if values.view(-1)[at].to(torch.bfloat16) != 1.0 else 2.0
    taken = Lanes([TensorPart(values, 0, 0, 1, copy), TensorPart(values, 0, 0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "CHUNK", chunk)
        assert taken().tolist() == [lanes_of_all(values)] * 2
    assert taken.unlike.tolist() == [wrong, 0]


def test_a_copy_is_a_bf16_table_of_the_same_shape():
    values = random_bits(4, 4)
    for copy in (values, values.to(torch.bfloat16)[:2], values.to(torch.float16)):
        with pytest.raises(ValueError, match="is not a copy of"):
            Lanes([TensorPart(values, 0, 0, 1, copy)])


def test_nothing_has_no_lanes():
    assert lanes([]).tolist() == []
    assert lanes([TensorPart(torch.empty(0, 5), 0, 0)]).tolist() == [[0, 0]]


def test_columns_must_be_adjacent():
    with pytest.raises(ValueError, match="adjacent"):
        lanes([TensorPart(torch.zeros(4, 4).T[:2], 0, 0)])
    with pytest.raises(ValueError, match="magnitudes"):
        Lanes([TensorPart(torch.zeros(2, 2, dtype=torch.float16), 0, 0)], magnitude=True)
