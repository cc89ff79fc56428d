"""The layouts that a run has had, in words."""

from dataclasses import replace

import pytest

from tests.unit.comparison.ledgers import HEADER, A, ledger
from tp_invariant_recipes.comparison.compare import compare
from tp_invariant_recipes.comparison.text import remarks
from tp_invariant_recipes.ledger.run_files import changes, ranks, words

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
