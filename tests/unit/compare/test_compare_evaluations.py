"""Comparing losses of validation and tests, also where runs validate at other steps or other sequences."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.compare.ledgers import HEADER, STEPS, record
from tp_invariant_recipes.features.bisect import workflow as bisect
from tp_invariant_recipes.ledger.reader import Ledger

LOSS, OTHER = "f32:40c80000", "f32:40c80001"
EVERY_SECOND = {
    2: {"validation/0:8": LOSS},
    4: {"validation/8:16": LOSS},
    5: {"final_validation/16:24": LOSS, "test/0:8": LOSS},
}


def evaluated(name, evaluations):
    steps = (replace(record(step), evaluations=evaluations.get(step, {})) for step in range(1, STEPS + 1))
    return Ledger(HEADER, tuple(steps), Path(name) / "ledger.jsonl", torn=False)


def test_bisect_trains_nothing_for_them(monkeypatch):
    """No trace covers an evaluation."""
    monkeypatch.setattr(bisect, "_can_be_trained", lambda ledger: True)
    monkeypatch.setattr(
        bisect, "read", {"a": evaluated("a", EVERY_SECOND), "b": evaluated("b", {2: {"validation/0:8": OTHER}})}.get
    )
    assert bisect.new("a", "b", None).recorded.first.phase == "evaluation"


def test_no_two_names_mean_the_same_sequences():
    with pytest.raises(ValueError, match="'validation/00:8' is not a name"):
        evaluated("a", {2: {"validation/00:8": LOSS}})
