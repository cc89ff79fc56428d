# SPDX-License-Identifier: Apache-2.0
"""Dumps: written by ranks, read back whole; how far two tensors are apart; damaged and missing files."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.kernels.launch import TensorPart
from tp_invariant_recipes.ledger.bits import ulp_distance
from tp_invariant_recipes.ledger.dumps import Distance, Dumped, distance, file_of, read_step, steps
from tp_invariant_recipes.observe.dump_writer import DumpWriter

NAME = "forward/decoder.layers.0/output"
WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def example_tensor(dtype=torch.bfloat16):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


def write_dump(run, x, step=3, name=NAME):
    """Two ranks: one has the even rows, the other the odd ones, in two pieces."""
    dtype = str(x.dtype).removeprefix("torch.")
    pieces = (TensorPart(x[::2], 0, 0, 2),), (TensorPart(x[1::2, :3], 1, 0, 2), TensorPart(x[1::2, 3:], 1, 3, 2))
    for rank, own in enumerate(pieces):
        writer = DumpWriter(run, rank, len(pieces))
        for piece in own:
            writer.add(name, dtype, (3, 2, 8), piece)
        writer.close_step(step)


@pytest.mark.parametrize(
    "dtype", (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool)
)
def test_what_ranks_wrote_is_read_back_whole(tmp_path, dtype):
    x = example_tensor(torch.float32).to(dtype)
    write_dump(tmp_path, x)
    dumps = read_step(tmp_path, 3)
    assert dumps.names == (NAME,)
    read = dumps.read(NAME)
    assert (read.dtype, read.shape) == (str(dtype).removeprefix("torch."), (3, 2, 8))
    assert read.bits.shape == (6, 8)
    assert read.bits.dtype == np.dtype(f"u{x.element_size()}")
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    assert read.bits.tobytes() == x.view(kinds[x.element_size()]).numpy().tobytes()
    assert steps(tmp_path) == [3]


def test_of_replicas_that_disagree_the_lowest_rank_counts(tmp_path):
    for rank in (0, 1):
        writer = DumpWriter(tmp_path, rank, 2)
        writer.add(NAME, "float32", (6, 8), TensorPart(example_tensor(torch.float32) + rank, 0, 0))
        writer.close_step(1)
    assert read_step(tmp_path, 1).read(NAME).bits.tobytes() == example_tensor(torch.float32).numpy().tobytes()


def test_what_is_not_there_is_reported(tmp_path):
    with pytest.raises(LedgerError, match=r"no dumps of step 3.*ledger\.trace=3:3"):
        read_step(tmp_path, 3)
    write_dump(tmp_path, example_tensor())
    with pytest.raises(LedgerError, match=f"has no weights/x; it has {NAME}"):
        read_step(tmp_path, 3).read("weights/x")


def test_a_missing_rank_is_named(tmp_path):
    write_dump(tmp_path, example_tensor())
    file_of(tmp_path, 3, 0).unlink()
    with pytest.raises(LedgerError, match=r"rank-0\.safetensors is missing: 1 of 2 ranks"):
        read_step(tmp_path, 3)


def test_pieces_that_are_not_the_whole_are_refused(tmp_path):
    writer = DumpWriter(tmp_path, 0, 1)
    writer.add(NAME, "float32", (6, 8), TensorPart(example_tensor(torch.float32)[:4], 0, 0))
    writer.add("hole", "float32", (6, 8), TensorPart(example_tensor(torch.float32)[:1], 0, 0))
    writer.add("hole", "float32", (6, 8), TensorPart(example_tensor(torch.float32)[5:], 5, 0))
    writer.close_step(1)
    for name in (NAME, "hole"):
        with pytest.raises(LedgerError, match=rf"step-0000001: the pieces of {name} are not the whole"):
            read_step(tmp_path, 1).read(name)


def test_every_torn_file_is_named(tmp_path):
    write_dump(tmp_path, example_tensor())
    file = file_of(tmp_path, 3, 1)
    data = file.read_bytes()
    for length in (*range(0, len(data), 7), len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(LedgerError, match=r"rank-1\.safetensors is not a whole dump"):
            read_step(tmp_path, 3)


def dump_of(dtype, patterns):
    return Dumped(dtype, (1, len(patterns)), np.array([patterns], dtype=f"u{WIDTHS[dtype]}"))


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=5))
@example([(0, 1 << 31)])
@example([(0x7F800000, 0xFF800000)])
@example([(0x7FC00000, 0x7FC00001), (0, 1)])
@example([(0x7F7FFFFF, 0xFF7FFFFF)])
def test_distance_of_float32_is_that_of_the_ledger(pairs):
    a, b = zip(*pairs, strict=True)
    result = distance(dump_of("float32", a), dump_of("float32", b))
    unequal = [(x, y) for x, y in pairs if x != y]
    each = [ulp_distance(f"f32:{x:08x}", f"f32:{y:08x}") for x, y in unequal]
    numbers = [ulp for ulp in each if ulp is not None]
    assert (result.total, result.differing) == (len(pairs), len(unequal))
    assert result.max_ulp == max(numbers, default=None)
    assert result.nans == len(each) - len(numbers)
    assert result.first == next(((0, n) for n, (x, y) in enumerate(pairs) if x != y), None)
    values = [[struct.unpack(">f", struct.pack(">I", p))[0] for p in pair] for pair in unequal]
    gaps = [abs(x - y) for x, y in values if not (math.isnan(x) or math.isnan(y))]
    assert result.max_difference == max(gaps, default=None)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
@example(0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF)  # the largest and the smallest: more than 2^63 apart
def test_distance_of_float64_is_that_of_the_ledger(a, b):
    result = distance(dump_of("float64", [a]), dump_of("float64", [b]))
    assert result.max_ulp == (ulp_distance(f"f64:{a:016x}", f"f64:{b:016x}") if a != b else None)


@pytest.mark.parametrize(
    "dtype, a, b, ulp, gap",
    (
        ("bfloat16", 0x3F80, 0x3F81, 1, 2.0**-7), ("bfloat16", 0x8000, 0x0000, 1, 0.0),
        ("bfloat16", 0xFF7F, 0x7F7F, 2 * 0x7F7F + 1, 2 * (2 - 2.0**-7) * 2.0**127),
        ("float16", 0x3C00, 0x3C02, 2, 2.0**-9), ("float16", 0x7BFF, 0x7C00, 1, math.inf),
    ),
)  # fmt: skip
def test_distance_of_two_bytes(dtype, a, b, ulp, gap):
    assert distance(dump_of(dtype, [7, a]), dump_of(dtype, [7, b])) == Distance(2, 1, ulp, gap, 0, (0, 1))


@pytest.mark.parametrize("dtype, nan", (("bfloat16", 0x7F81), ("float16", 0xFC01), ("float64", 0x7FF0000000000001)))
def test_nans_are_counted_and_no_distance(dtype, nan):
    assert distance(dump_of(dtype, [nan, nan]), dump_of(dtype, [nan, 0])) == Distance(2, 1, None, None, 1, (0, 1))


def test_tensors_of_another_kind_have_no_distance():
    with pytest.raises(LedgerError, match="no distance between float32"):
        distance(dump_of("float32", [1]), dump_of("float32", [1, 2]))
    with pytest.raises(LedgerError, match="bfloat16"):
        distance(dump_of("float16", [1]), dump_of("bfloat16", [1]))
