"""The benchmark's statistics, by their properties."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_invariant_recipes.features.bench.workflow import _ratio, _round
from tp_invariant_recipes.runs.bench_dir import Figures

SECONDS = st.floats(min_value=1e-6, max_value=1e4)


def slowest(ranks):
    """The milliseconds of every step of a pass in which the ranks took so long."""
    common = {"pass_": 0, "mode": "tree", "round": 1, "profile": False, "counts": True, "tokens": 64}
    common |= {"memory": "allocated", "peak_bytes": 0}
    lines = [[Figures(step=n, seconds=s, **common) for n, s in enumerate(rank, 1)] for rank in ranks]
    return _round(lines, 0)["step_ms"]


def ratio(first, other):
    return _ratio([{"ms": item} for item in first], [{"ms": item} for item in other], "ms")


@settings(max_examples=10)
@given(
    st.integers(1, 10).flatmap(lambda n: st.lists(st.lists(SECONDS, min_size=n, max_size=n), min_size=1, max_size=8))
)
def test_a_step_takes_as_long_as_its_slowest_rank(ranks):
    results = slowest(ranks)
    assert len(results) == len(ranks[0])
    for step, seconds in enumerate(results):
        assert seconds in [1000 * rank[step] for rank in ranks]
        assert all(1000 * rank[step] <= seconds for rank in ranks)
    assert slowest(ranks[::-1]) == results


def test_ranks_that_took_different_numbers_of_steps_are_refused():
    with pytest.raises(ValueError):
        slowest([[1.0, 2.0], [1.0]])


@settings(max_examples=10)
@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=9), st.data())
def test_a_round_in_which_the_whole_machine_was_slower_changes_no_ratio(rounds, data):
    first, other = zip(*rounds, strict=True)
    slower = data.draw(st.lists(st.sampled_from([1.0, 2.0, 8.0]), min_size=len(first), max_size=len(first)))
    hindered = [[a * s for a, s in zip(mode, slower, strict=True)] for mode in (first, other)]
    assert ratio(*hindered) == ratio(first, other)


def test_the_ratio_is_the_median_over_rounds_and_its_ends_are_rounds():
    assert ratio([1.0, 2.0, 4.0], [2.0, 2.0, 12.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    with pytest.raises(ValueError):
        ratio([1.0], [1.0, 2.0])
