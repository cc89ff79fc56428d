# SPDX-License-Identifier: Apache-2.0
"""Curves of a report lose no extreme, however many steps there are."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from tests.ledgers import record
from tp_invariant_recipes.ledger.bits import float_bits
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.record import Header
from tp_invariant_recipes.report.figures import Drawing, curve, distances, recorded
from tp_invariant_recipes.report.page import svg

NAN, NEGATIVE_NAN = "f32:7fc00000", "f32:ffc00000"


def ledger_of(*losses) -> Ledger:
    steps = tuple(record(n, loss=loss, skipped=loss is None) for n, loss in enumerate(losses, 1))
    return Ledger(Header(identity={"rng.seed": 1}), steps, Path("run/ledger.jsonl"), torn=False)


@pytest.mark.parametrize("spike", (1, 2, 77_777, 100_000))
def test_a_figure_of_many_steps_is_small_and_loses_no_spike(spike):
    noise = np.random.default_rng(1).random(100_000)
    noise[spike - 1] = 30.0

    def draw(figure):
        axes = figure.add_subplot()
        axes.set_axis_off()
        axes.plot(*curve(enumerate(noise, 1)))

    drawn = svg(Drawing("noise", "", "", "", 5.0, draw))
    assert len(drawn) < 100_000
    path = max(re.findall(r'd="([^"]*)"', drawn), key=len)
    heights = [float(y) for _, y in re.findall(r"[ML] (\S+) (\S+)", path)]
    assert min(heights) < sorted({*heights})[1] - 200  # the noise stays below it


def test_what_is_no_finite_number_is_a_gap():
    _, values = curve([(1, 1.0), (2, None), (3, math.nan), (4, math.inf), (5, 2.0)])
    assert np.isfinite(values).tolist() == [True, False, False, False, True]


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
