# SPDX-License-Identifier: Apache-2.0
"""Exact text of floats: every pattern survives, nothing is rounded, order and distance are those of the numbers."""

import math
import struct
from dataclasses import replace

import numpy
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.comparison.ledgers import HEADER, A, ledger
from tp_invariant_recipes.comparison.compare import compare
from tp_invariant_recipes.comparison.text import remarks
from tp_invariant_recipes.ledger.bits import bits_float, float_bits, readable, ulp_distance
from tp_invariant_recipes.ledger.run_files import changes, ranks, words

QUIET, SIGNALLING, NEGATIVE_NAN = 0x7FC00000, 0x7F800001, 0xFFA12345
F32_PATTERNS = st.one_of(
    st.integers(0, 2**32 - 1),
    st.builds(lambda sign, fraction: sign << 31 | 0x7F800000 | fraction, st.integers(0, 1), st.integers(1, 2**23 - 1)),
)
F64_PATTERNS = st.integers(0, 2**64 - 1)


def f32(pattern: int) -> str:
    return f"f32:{pattern:08x}"


@given(F32_PATTERNS)
@example(0)
@example(1)
@example(0x007FFFFF)
@example(0x7F7FFFFF)
@example(0x7F800000)
@example(0x80000000)
@example(0xFF800000)
@example(QUIET)
@example(SIGNALLING)
@example(NEGATIVE_NAN)
def test_every_f32_pattern_survives(pattern):
    value = bits_float(f32(pattern))
    assert float_bits(value, 32) == f32(pattern)
    if not math.isnan(value):
        assert struct.pack(">f", value) == pattern.to_bytes(4)


@given(F64_PATTERNS)
@example(0x7FF0000000000001)
def test_every_f64_pattern_survives(pattern):
    value = struct.unpack(">d", pattern.to_bytes(8))[0]
    assert float_bits(value, 64) == f"f64:{pattern:016x}"
    assert struct.pack(">d", bits_float(f"f64:{pattern:016x}")) == pattern.to_bytes(8)


@given(F64_PATTERNS)
@example(struct.unpack(">Q", struct.pack(">d", 0.1))[0])
@example(struct.unpack(">Q", struct.pack(">d", 1e300))[0])
@example(0x7FF8000000000001)
def test_a_float_is_f32_exactly_or_refused(pattern):
    value = struct.unpack(">d", pattern.to_bytes(8))[0]
    try:
        text = float_bits(value, 32)
    except ValueError:
        if math.isnan(value):
            assert pattern % 2**29 != 0
        else:
            assert abs(value) > bits_float("f32:7f7fffff") or struct.unpack(">f", struct.pack(">f", value))[0] != value
    else:
        assert struct.pack(">d", bits_float(text)) == pattern.to_bytes(8)


def test_known_texts():
    assert float_bits(6.25, 32) == "f32:40c80000"
    assert float_bits(3e-4, 64) == "f64:3f33a92a30553261"
    assert float_bits(-0.0, 32) == "f32:80000000" != float_bits(0.0, 32)


@pytest.mark.parametrize(
    "text",
    ("f32:40C80000", "f32:40c8000", "f32:40c800000", "f64:40c80000", "40c80000", "f16:4000", "f32:40c80000\n", 6.25),
)
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError):
        bits_float(text)


@pytest.mark.parametrize("width", (16, 0, "32", None))
def test_other_widths_are_refused(width):
    with pytest.raises(ValueError):
        float_bits(1.0, width)


@given(F32_PATTERNS, F32_PATTERNS)
def test_distance_is_symmetric_and_zero_only_for_equal_bits(a, b):
    distance = ulp_distance(f32(a), f32(b))
    assert distance == ulp_distance(f32(b), f32(a))
    if math.isnan(bits_float(f32(a))) or math.isnan(bits_float(f32(b))):
        assert distance is None
    else:
        assert (distance == 0) == (a == b)


@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(1, 1000))
@example(-0.0, 1)
@example(-3 * 2.0**-149, 7)
def test_distance_counts_representable_numbers(value, steps):
    walked = value
    for _ in range(steps):
        walked = next_up_f32(walked)
    # next_up_f32 goes from -0.0 to the smallest number, which is two steps when 0.0 counts.
    extra = 1 if math.copysign(1, value) < 0 and math.copysign(1, walked) > 0 else 0
    assert ulp_distance(float_bits(value, 32), float_bits(walked, 32)) == steps + extra


def next_up_f32(value: float) -> float:
    """The next f32 above, found with numpy, which knows nothing of our code."""
    return float(numpy.nextafter(numpy.float32(value), numpy.float32(math.inf)))


def test_readable_is_short():
    assert readable(float_bits(struct.unpack(">f", struct.pack(">f", 6.2411))[0], 32)) == 6.2411
    assert readable("f64:3f33a92a30553261") == 3e-4
    assert readable("f32:ff800000") == "-inf"
    assert readable(f32(NEGATIVE_NAN)) == "nan"


LAYOUT = {"cp": 1, "dp": 2, "ep": 1, "etp": 1, "pp": 1, "sp": True, "tp": 4}


@pytest.mark.parametrize(
    "degrees, message",
    ((LAYOUT, "tp=4 dp=2"), (LAYOUT | {"tp": 1, "dp": 1}, "tp=1"), ({"tp": "4", "dp": None}, "tp=1")),
)
def test_degrees_above_one(degrees, message):
    assert words(degrees) == message


def resumed_header(*resumed):
    notes = {"resumed": [{"after_step": step, "changed": changed} for step, changed in resumed]}
    return replace(HEADER, layout=LAYOUT, notes=notes)


def test_what_changed_and_when():
    """Changes are those from the header's own layout; a change of anything else is none of these."""
    result = changes(resumed_header((2, {"layout.dp": 1, "layout.pp": 2}), (4, {}), (6, {"versions.torch": "2"})))
    assert result == [(1, "tp=4 dp=2"), (3, "tp=4 pp=2"), (5, "tp=4 dp=2")]
    assert changes(resumed_header((2, {"versions.torch": "2"}))) == changes(replace(HEADER, layout=LAYOUT)) == []


def test_a_comparison_says_so():
    resumed = ledger("b", header=resumed_header((2, {"layout.dp": 1})))
    message = remarks(compare(A, resumed))
    assert any(line.endswith(": tp=4 dp=2, from step 3 on tp=4.") for line in message), message


def test_experts_take_no_ranks_of_their_own():
    assert ranks({"tp": 2, "pp": 3, "cp": 5, "dp": 7, "ep": 11, "etp": 13}) == 210
