# SPDX-License-Identifier: Apache-2.0
"""Curves of a report lose no extreme, however many steps there are."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ledgers import record
from tp_invariant_recipes.ledger.bits import float_bits
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.record import Header
from tp_invariant_recipes.report.figures import POINTS, curve, distances, recorded

NAN, NEGATIVE_NAN = "f32:7fc00000", "f32:ffc00000"


def ledger_of(*losses) -> Ledger:
    steps = tuple(record(n, loss=loss, skipped=loss is None) for n, loss in enumerate(losses, 1))
    return Ledger(Header(identity={"rng.seed": 1}), steps, Path("run/ledger.jsonl"), torn=False)


def test_a_curve_that_fits_is_drawn_as_it_is():
    drawn = curve((step, float(step % 7)) for step in range(1, POINTS + 1))
    assert drawn.block == 1
    assert drawn.x.tolist() == list(range(1, POINTS + 1))
    assert drawn.y.tolist() == drawn.low.tolist() == drawn.high.tolist() == [step % 7 for step in range(1, POINTS + 1)]


@settings(max_examples=10)
@given(st.integers(POINTS + 1, 6 * POINTS), st.data())
def test_no_spike_is_lost_in_blocks(steps, data):
    spike = data.draw(st.integers(1, steps))
    drawn = curve((step, 9.0 if step == spike else 1.0) for step in range(1, steps + 1))
    assert len(drawn.x) <= POINTS
    assert drawn.high.max() == 9.0
    assert abs(drawn.x[drawn.high.argmax()] - spike) <= drawn.block / 2
    assert drawn.low.min() == 1.0


def test_what_is_no_finite_number_is_a_gap_and_counted():
    drawn = curve([(1, 1.0), (2, None), (3, math.nan), (4, math.inf), (5, 2.0)])
    assert np.isfinite(drawn.y).tolist() == [True, False, False, False, True]
    assert drawn.missing == 3


def test_recorded_values_are_the_bits():
    losses = [float_bits(1.5, 32), None, NAN]
    (single, value), (two, nothing), (three, nan) = recorded(ledger_of(*losses), "loss")
    assert (single, value, two, nothing, three) == (1, 1.5, 2, None, 3)
    assert math.isnan(nan)


@pytest.mark.parametrize(
    "a, b, ulp",
    (
        ("f32:40c80000", "f32:40c80000", 0), ("f32:40c80000", "f32:40c80003", 3), (NAN, NAN, 0),
        (NAN, NEGATIVE_NAN, None), (None, None, 0), (None, "f32:40c80000", None),
    ),
)  # fmt: skip
def test_distances_are_in_ulp(a, b, ulp):
    assert distances(ledger_of(a), ledger_of(b), "loss") == [(1, ulp)]
