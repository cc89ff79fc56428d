"""Cells of `tpi audit --all` cover each pair of settings once, and a fault is shrunk to the settings that it needs."""

from itertools import combinations

import pytest

from tp_invariant_recipes.features.audit.cells import MOST, Covering, pairs, shrunk

AXES = (
    ("tp=2", "tp=2 sp=false"), ("dp=2",), ("mbs=2",), ("loss",), ("sinks",), ("adam", "muon"), ("masks",), ("eval",),
)  # fmt: skip
LAYOUTS = 3


def cost(setting: str) -> int:
    return 2 if setting.startswith(("tp", "dp")) else 1


def covered(allowed=lambda cell: True):
    covering = Covering(AXES, LAYOUTS, allowed, cost)
    cells = []
    while (cell := covering.next()) is not None:
        cells.append(cell)
        covering.cover(cell)
    return covering, cells


def test_each_pair_is_in_a_cell_and_no_cell_has_two_settings_of_an_axis():
    covering, cells = covered()
    wanted = {frozenset(pair) for pair in pairs(AXES)}
    assert {frozenset(pair) for cell in cells for pair in combinations(cell, 2)} >= wanted
    assert not covering.pending
    assert len(cells) < len(wanted) / 2
    for cell in cells:
        assert 1 <= len(cell) <= MOST
        assert all(len(cell & {*axis}) <= 1 for axis in AXES)
        assert covering.changes_layout(cell)


def test_a_cell_that_no_run_may_have_is_not_tried_and_its_pair_is_omitted():
    refused = {frozenset(("sinks", "muon")), frozenset(("tp=2", "eval"))}
    _, cells = covered(lambda cell: not any(pair <= cell for pair in refused))
    assert not any(pair <= cell for cell in cells for pair in refused)
    assert any({"dp=2", "eval"} <= cell for cell in cells)


@pytest.mark.parametrize("cause", ({"tp=2"}, {"tp=2", "sinks"}, {"tp=2", "loss", "muon"}))
def test_a_fault_is_shrunk_to_its_cause(cause):
    cell = frozenset(("tp=2", "loss", "sinks", "muon", "masks"))
    tried = []

    def fails(smaller):
        tried.append(smaller)
        return cause <= smaller

    assert shrunk(cell, fails) == cause
    assert len(tried) == len(cell)
