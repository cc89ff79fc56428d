"""What a run goes on from, against its ledger: every difference is named, and what the ledger lacks is said."""

from dataclasses import replace

import pytest

from tests.unit.compare.ledgers import FC1, NAMES, record, value
from tests.unit.compare.test_compare_state import line
from tp_invariant_recipes.compare.comparability import problem, remark

LINE = line(4, state=True)
LOADED = replace(LINE, weights={name: value(name) for name in NAMES})
FC1 = f"{FC1}.weight"


def test_what_is_equal_goes_on():
    assert problem(LINE, LOADED) is None
    assert remark(LINE, LOADED) == "step 4 as loaded: master weights, optimizer moments equal to the ledger"


@pytest.mark.parametrize("kind, name", (("masters", FC1), ("moments", f"exp_avg/{FC1}"), ("moments", f"step/{FC1}")))
def test_any_difference_is_named(kind, name):
    message = problem(LINE, replace(LOADED, **{kind: getattr(LOADED, kind) | {name: "0" * 32}}))
    assert f"the state loaded for step 4 is not the one that the ledger has of it: {kind}/{name} differ." in message
    assert "checkpoint.ckpt_step=STEP" in message


def test_replicas_and_copies_that_differ_are_named():
    assert f"weights/{FC1} (on some ranks)" in problem(LINE, replace(LOADED, diverged=(("copies", FC1, ((1,),)),)))
    diverged = replace(LOADED, diverged=(("masters", FC1, ((0,), (1,))),))
    assert f"masters/{FC1} (on some ranks)" in problem(LINE, diverged)


def test_a_state_that_was_not_loaded_is_a_difference():
    assert problem(LINE, replace(LOADED, moments=None)).count("moments/") == 5
    assert "and 37 more differ" in problem(LINE, replace(LOADED, moments=None))


def test_a_ledger_of_an_earlier_version_has_weights_alone():
    old = record(4)
    loaded = replace(LOADED, weights=old.weights)
    assert problem(old, loaded) is None
    assert remark(old, loaded) == (
        "step 4 as loaded: weights equal to the ledger; not compared, since the ledger has no digests of them: master "
        "weights, optimizer moments"
    )
    assert f"weights/{FC1}" in problem(old, replace(loaded, weights=old.weights | {FC1: "0" * 32}))


def test_a_step_without_digests_is_not_compared():
    bare = record(4, digested=False)
    assert problem(bare, LOADED) is None
    assert remark(bare, LOADED).startswith("not compared, since the ledger has no digests of them: master weights")
