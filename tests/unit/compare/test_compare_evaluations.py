"""Comparing losses of validation and tests, also where runs validate at other steps or other sequences."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.compare.ledgers import HEADER, STEPS, record
from tp_invariant_recipes.compare.compare import Verdict, compare
from tp_invariant_recipes.compare.comparison_json import comparison_json
from tp_invariant_recipes.compare.text import remarks, verdict_line
from tp_invariant_recipes.features.bisect import workflow as bisect
from tp_invariant_recipes.ledger.reader import Ledger

LOSS, OTHER = "f32:40c80000", "f32:40c80001"
EVERY_SECOND = {
    2: {"validation/0:8": LOSS},
    4: {"validation/8:16": LOSS},
    5: {"final_validation/16:24": LOSS, "test/0:8": LOSS},
}
NO_STATE = "Not compared: clipped gradients and optimizer moments, of which neither run has digests at a common step."


def ledger(name, evaluations):
    steps = (replace(record(step), evaluations=evaluations.get(step, {})) for step in range(1, STEPS + 1))
    return Ledger(HEADER, tuple(steps), Path(name) / "ledger.jsonl", torn=False)


A = ledger("a", EVERY_SECOND)


def test_the_verdict_names_the_compared_losses():
    comparison = compare(A, ledger("b", EVERY_SECOND))
    assert verdict_line(comparison).endswith(
        "parameters, validation loss (at steps 2 and 4), final validation loss (at step 5) and test loss (at step 5) "
        "equal bit for bit"
    )
    assert remarks(comparison) == (NO_STATE,)


def test_one_other_bit_is_a_difference():
    for step, name in ((4, "validation/8:16"), (5, "final_validation/16:24"), (5, "test/0:8")):
        comparison = compare(A, ledger("b", EVERY_SECOND | {step: EVERY_SECOND[step] | {name: OTHER}}))
        first = comparison_json(comparison)["first_difference"]
        kind = name.partition("/")[0]
        assert [first[key] for key in ("step", "phase", "kind", "name", "ulp")] == [step, "evaluation", kind, name, 1]
        assert first["a"] == {"bits": LOSS, "value": 6.25}
        assert first["inputs_matched"] is True
        words = f"{kind.replace('_', ' ')} loss ({name}) f32:40c80000 6.25 vs f32:40c80001 6.2500005, 1 ULP"
        assert (
            verdict_line(comparison) == f"different at step {step}: {words}, all weights matched; 1 of 5 steps differ"
        )


def test_an_earlier_difference_of_the_step_comes_first():
    other = ledger("b", {2: {"validation/0:8": OTHER}})
    steps = tuple(replace(step, loss=OTHER) if step.step == 2 else step for step in other.steps)
    assert compare(A, replace(other, steps=steps)).first.name == "loss"


def test_losses_of_other_sequences_are_not_compared():
    shifted = ledger("b", {2: {"validation/0:8": LOSS}, 4: {"validation/16:24": OTHER}})
    comparison = compare(A, shifted)
    assert comparison.verdict is Verdict.IDENTICAL
    assert "validation loss (at step 2) equal bit for bit" in verdict_line(comparison)
    assert remarks(comparison) == (
        NO_STATE,
        "Equal sequences have a validation loss at 1 of 5 steps; a alone has them at 1; b alone has them at 1.",
        "Equal sequences have a final validation loss at 0 of 5 steps; a alone has them at 1.",
        "Equal sequences have a test loss at 0 of 5 steps; a alone has them at 1.",
    )


def test_bisect_trains_nothing_for_them(monkeypatch):
    """No trace covers an evaluation."""
    monkeypatch.setattr(bisect, "_can_be_trained", lambda ledger: True)
    monkeypatch.setattr(bisect, "read", {"a": A, "b": ledger("b", {2: {"validation/0:8": OTHER}})}.get)
    assert bisect.new("a", "b", None).first.phase == "evaluation"


def test_no_two_names_mean_the_same_sequences():
    with pytest.raises(ValueError, match="'validation/00:8' is not a name"):
        ledger("a", {2: {"validation/00:8": LOSS}})
