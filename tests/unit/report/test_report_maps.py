"""What a report draws: curves lose no extreme, maps show every difference where it is, however many there are."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.ledgers import record
from tp_invariant_recipes.compare.compare import compare
from tp_invariant_recipes.ledger.bits import float_bits
from tp_invariant_recipes.ledger.digests import Parameter
from tp_invariant_recipes.ledger.dumps import Distance
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.record import Header, StepRecord
from tp_invariant_recipes.report.curves import POINTS, curve, distances, recorded
from tp_invariant_recipes.report.figures import _classes, in_words, rectangles
from tp_invariant_recipes.report.maps import COLUMNS, ROWS, CellState, Measured, largest, parameter_map
from tp_invariant_recipes.report.palette import COLOURS

LAYERS = tuple(f"decoder.layers.{n}.mlp.linear_fc{k}.weight" for n in range(3) for k in (1, 2))
EQUAL, OTHER = "0" * 32, "f" * 32
NAN, NEGATIVE_NAN = "f32:7fc00000", "f32:ffc00000"


def ledger_with_digests(steps: int, names=LAYERS, differing=(), every: int = 1, losses=None) -> Ledger:
    """differing: (step, parameter) pairs whose gradient has another digest. every: how often digests are recorded."""
    header = Header(
        identity={"rng.seed": 1}, parameters=tuple(Parameter(n, (2,), "float32", "bfloat16") for n in names)
    )
    different = set(differing)

    def recorded_step(step: int) -> StepRecord:
        digests = {name: OTHER if (step, name) in different else EQUAL for name in names} if step % every == 0 else None
        loss = {"loss": losses[step - 1], "skipped": losses[step - 1] is None} if losses else {}
        return record(step, gradients=digests, **loss)

    return Ledger(header, tuple(map(recorded_step, range(1, steps + 1))), Path("run/ledger.jsonl"), torn=False)


def map_of(a: Ledger, b: Ledger, **more):
    return parameter_map(compare(a, b), "gradients", **more)


# --- curves -------------------------------------------------------------------------------------------------


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
    (single, value), (two, nothing), (three, nan) = recorded(ledger_with_digests(3, losses=losses), "loss")
    assert (single, value, two, nothing, three) == (1, 1.5, 2, None, 3)
    assert math.isnan(nan)


@pytest.mark.parametrize(
    "a, b, ulp",
    (
        ("f32:40c80000", "f32:40c80000", 0),
        ("f32:40c80000", "f32:40c80003", 3),
        (NAN, NAN, 0),
        (NAN, NEGATIVE_NAN, None),
        (None, None, 0),
        (None, "f32:40c80000", None),
    ),
)
def test_distances_are_in_ulp(a, b, ulp):
    assert distances(ledger_with_digests(1, losses=[a]), ledger_with_digests(1, losses=[b]), "loss") == [(1, ulp)]


# --- maps ---------------------------------------------------------------------------------------------------


@given(st.sets(st.tuples(st.integers(1, 9), st.sampled_from(LAYERS)), min_size=1))
def test_a_map_shows_every_difference_where_it_is(spacing):
    result = map_of(ledger_with_digests(9), ledger_with_digests(9, differing=spacing))
    rows = [row.label for row in result.rows]
    assert rows == list(LAYERS)
    for row, name in enumerate(rows):
        for column, (step, _) in enumerate(result.columns):
            expected = CellState.DIFFERENT if (step, name) in spacing else CellState.IDENTICAL
            assert result.states[row, column] == expected
    assert (result.differing, result.compared) == (len(spacing), 9 * len(LAYERS))
    assert result.first == min(step for step, _ in spacing)
    assert result.parameters_differing == len({name for _, name in spacing})
    assert result.steps_differing == len({step for step, _ in spacing})


@settings(max_examples=10)
@given(st.integers(1, 4 * COLUMNS), st.data())
def test_one_difference_among_many_steps_is_seen(steps, data):
    step = data.draw(st.integers(1, steps))
    result = map_of(ledger_with_digests(steps, LAYERS[:2]), ledger_with_digests(steps, LAYERS[:2], [(step, LAYERS[1])]))
    assert len(result.columns) <= COLUMNS
    assert [first for first, _ in result.columns[1:]] == [last + 1 for _, last in result.columns[:-1]]
    (column,) = (n for n, (first, last) in enumerate(result.columns) if first <= step <= last)
    expected = np.full((2, len(result.columns)), CellState.IDENTICAL)
    alone = result.columns[column][0] == result.columns[column][1]
    expected[1, column] = CellState.DIFFERENT if alone else CellState.PARTLY_DIFFERENT
    assert (result.states == expected).all()


@pytest.mark.parametrize("layers, experts", ((9, 64), (150, 1)))
def test_one_difference_among_thousands_of_parameters_is_seen(layers, experts):
    names = [f"decoder.layers.{n}.mlp.experts.linear_fc{k}.weight{e}" for n in range(layers) for e in range(experts)
             for k in (1, 2)]  # fmt: skip
    culprit = names[len(names) // 3]
    result = map_of(ledger_with_digests(2, names), ledger_with_digests(2, names, [(2, culprit)]))
    assert len(result.rows) <= ROWS
    assert sorted(name for row in result.rows for name in row.parameters) == sorted(names)
    (row,) = (n for n, row in enumerate(result.rows) if culprit in row.parameters)
    expected = np.full((len(result.rows), 2), CellState.IDENTICAL)
    expected[row, 1] = CellState.PARTLY_DIFFERENT
    assert (result.states == expected).all()
    assert in_words(result).startswith(f"1 of {2 * len(names):,} digests of gradients differ. They belong to 1 of ")


def test_steps_at_which_one_run_alone_has_digests_are_omitted():
    result = map_of(ledger_with_digests(12, every=2), ledger_with_digests(12, every=3))
    assert result.columns == ((6, 6), (12, 12))
    assert (result.steps_compared, result.steps_alone) == (2, 6)
    assert map_of(ledger_with_digests(3), ledger_with_digests(3, every=4)) is None


def test_a_parameter_that_one_run_lacks_is_not_compared():
    result = map_of(ledger_with_digests(2), ledger_with_digests(2, LAYERS[:-1]))
    assert (result.states[:-1] == CellState.IDENTICAL).all()
    assert (result.states[-1] == CellState.NOT_COMPARED).all()


def test_dumps_say_the_distance():
    distance = Distance(4, 2, 7, 0.5, 0, (0,))
    measured = (Measured(2, f"gradients/{LAYERS[1]}", distance), Measured(2, f"weights/{LAYERS[0]}", distance))
    result = map_of(
        ledger_with_digests(2),
        ledger_with_digests(2, differing=[(2, LAYERS[1])]),
        dumped=largest(measured, "gradients"),
    )
    assert result.ulp[1, 1] == 7
    assert np.isnan(result.ulp).sum() == result.ulp.size - 1


def test_numbers_have_a_row_of_their_distances_above_the_parameters():
    losses = ["f32:40c80000", "f32:40c80001", "f32:40c80000", NAN]
    result = map_of(ledger_with_digests(4), ledger_with_digests(4, losses=losses))
    assert [row.label for row in result.rows] == ["loss", *LAYERS]  # the norm and the rate are equal at all steps
    assert np.array_equal(result.ulp[0], [np.nan, 1, np.nan, np.inf], equal_nan=True)
    assert result.states[0].tolist() == [CellState.IDENTICAL, CellState.DIFFERENT] * 2
    assert (result.states[1:] == CellState.IDENTICAL).all()
    assert (result.compared, result.differing) == (4 * len(LAYERS), 0)  # digests, and no numbers


@given(st.lists(st.sampled_from((np.nan, 1, 2, 100, 1e4, 1e6, 1e8, 4e9, np.inf)), min_size=6, max_size=6))
def test_every_cell_has_the_one_colour_of_its_distance(ulp):
    result = map_of(ledger_with_digests(1), ledger_with_digests(1, differing=[(1, LAYERS[0])]))
    result = replace(result, ulp=np.array(ulp)[:, None])
    of_states, of_distances = _classes(result)
    cells = [(mask[row, 0], colour) for row in range(6) for mask, colour, _ in (*of_states, *of_distances)]
    chosen = [colour for is_in, colour in cells if is_in]
    assert len(chosen) == 6
    state = ["different", *["identical"] * 5]
    place = {1: 0, 2: 1, 100: 1, 1e4: 2, 1e6: 3, 1e8: 4, 4e9: 5, np.inf: 5}
    assert chosen == [state[n] if np.isnan(item) else f"ulp-{place[item]}" for n, item in enumerate(ulp)]


def _luminance(colour: str) -> float:
    """Relative luminance of sRGB as WCAG 2 defines it."""
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def _contrast(first: str, other: str) -> float:
    low, high = sorted((_luminance(first), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("screen", (0, 1), ids=("light", "dark"))
def test_distances_differ_in_brightness_alone_and_their_text_is_readable(screen):
    """Who sees no colours orders them by brightness, which leads away from the paper; the text has WCAG's contrast."""
    shown = {name: values[screen] for name, values in COLOURS.items()}
    scale = [shown[f"ulp-{n}"] for n in range(6)]
    from_paper = [_contrast(colour, shown["paper"]) for colour in scale]
    assert all(later > 1.25 * earlier for earlier, later in itertools.pairwise(from_paper))
    assert all(_contrast(colour, shown["ink"]) >= 4.5 for colour in scale[:3])
    assert all(_contrast(colour, shown["paper"]) >= 4.5 for colour in scale[3:])


@given(arrays.arrays(np.bool_, st.tuples(st.integers(1, 9), st.integers(1, 9))))
def test_rectangles_cover_every_cell_once(marked):
    covered = np.zeros(marked.shape, dtype=int)
    for x0, y0, x1, y1 in rectangles(marked):
        covered[y0:y1, x0:x1] += 1
    assert (covered == marked).all()
