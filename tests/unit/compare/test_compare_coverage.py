"""Comparing runs of which one recorded less, and the table of parameters that differ."""

from dataclasses import replace

import pytest

from tests.unit.compare.ledgers import (
    BARE,
    HEADER,
    NAMES,
    NO_STATE,
    NONE,
    PARAMETERS,
    A,
    grown,
    ledger,
    value,
    with_other,
)
from tp_invariant_recipes.compare.compare import Coverage, Verdict, compare
from tp_invariant_recipes.compare.text import compared_values, parameter_line, parameter_rows, remarks, verdict_line


@pytest.mark.parametrize("who", ("a", "b", "both"))
def test_runs_without_digests(who):
    a = ledger("a", BARE, digested=NONE) if who != "b" else A
    b = ledger("b", BARE, digested=NONE) if who != "a" else ledger()
    result = compare(a, b)
    assert (result.verdict, result.model) == (Verdict.IDENTICAL, ())
    assert verdict_line(result) == "identical: 5 steps, loss, gradient norm and learning rate equal bit for bit"
    [sentence] = remarks(result)
    lacking = "neither run has any" if who == "both" else f"{who} has no"
    assert sentence.startswith(
        f"Gradients and weights themselves are not compared: {lacking} digests (ledger.digests=1"
    )


def test_digests_every_n_steps():
    result = compare(A, ledger(digested=lambda step: step % 2 == 0))
    assert result.coverage["gradients"] == result.coverage["weights"] == Coverage(both=2, only_a=3, only_b=0)
    assert "gradients and weights of 14 parameters (at 2 of 5 steps) equal bit for bit" in verdict_line(result)
    assert remarks(result) == (
        NO_STATE,
        "Digests of gradients and weights are compared at 2 of 5 steps; a alone has them at 3.",
    )
    never_both = compare(ledger("a", digested=lambda s: s % 2 == 0), ledger(digested=lambda s: s % 2 == 1))
    assert compared_values(never_both) == "loss, gradient norm and learning rate"
    assert remarks(never_both) == (
        NO_STATE,
        "Digests of gradients and weights are compared at 0 of 5 steps; a alone has them at 2; b alone has them at 3.",
    )


def test_a_difference_at_a_step_that_one_run_did_not_record_is_not_seen():
    even = dict(digested=lambda step: step % 2 == 0)
    assert compare(ledger("a", **even), ledger(**with_other(3, weights=NAMES[0]))).verdict is Verdict.IDENTICAL
    later = ledger(at=4, **with_other(4, weights=NAMES[0]))
    assert compare(ledger("a", **even), later).first.step == 4


def test_frozen_parameters_have_no_gradient():
    frozen = replace(HEADER, parameters=tuple(replace(p, gradient=None) if "norm" in p.name else p for p in PARAMETERS))
    gradients = {p.name: value(p.name) for p in frozen.parameters if p.gradient}
    first, other = (ledger(name, frozen, at=1, steps=1, gradients=gradients) for name in "ab")
    assert compared_values(compare(first, other)).endswith("gradients of 9 parameters and weights of 14 parameters")


@pytest.mark.parametrize("who", ("a", "b"))
def test_a_loss_that_one_run_lacks_is_not_comparable_unless_it_skipped_the_step(who):
    """The schema asks for a loss; a kind of value that a later one adds may be missing."""
    gone = ledger(who)
    object.__setattr__(gone.steps[2], "loss", None)
    comparison = compare(*((gone, ledger("b")) if who == "a" else (A, gone)))
    assert verdict_line(comparison) == f"not comparable: only {'b' if who == 'a' else 'a'} has loss, at step 3"
    assert comparison.exit_status == 2
    skipped = ledger(who, skipped=True, loss=None, grad_norm=None)
    assert compare(A, skipped).verdict is Verdict.DIFFERENT
    assert compared_values(compare(skipped, skipped)).startswith("loss, gradient norm, learning rate and gradients")
    never = replace(skipped, steps=tuple(replace(s, skipped=True, loss=None, grad_norm=None) for s in skipped.steps))
    assert compared_values(compare(never, never)) == "learning rate and gradients and weights of 14 parameters"


def test_parameters_are_in_the_order_in_which_they_first_differ():
    starts = (
        ("weights", NAMES[1], 4),
        ("weights", NAMES[5], 2),
        ("gradients", NAMES[3], 3),
        ("gradients", NAMES[1], 3),
    )
    result = compare(A, grown(*starts))
    rows = [(row.name, row.gradient, row.weight, row.steps) for row in parameter_rows(result)]
    assert rows == [(NAMES[5], None, 2, 4), (NAMES[3], 3, None, 3), (NAMES[1], 3, 4, 3)]
    assert [(p.kind, p.first_step, p.steps) for p in result.parameters if p.name == NAMES[1]] == [
        ("gradients", 3, (3, 4, 5)),
        ("weights", 4, (4, 5)),
    ]
    assert parameter_line(result) == "3 of 14 parameters differ, the first at step 2"


def test_all_parameters_in_one_line():
    result = compare(A, grown(*((kind, name, 2) for name in NAMES for kind in ("gradients", "weights"))))
    assert parameter_line(result) == "all 14 parameters differ: gradients from step 2, weights from step 2"


def test_gradients_and_weights_are_both_compared_where_both_runs_have_both():
    only_weights = replace(A, steps=tuple(replace(s, gradients=None) if s.step > 2 else s for s in A.steps))
    result = compare(only_weights, ledger())
    assert (result.coverage["gradients"].both, result.coverage["weights"].both) == (2, 5)
    assert result.steps_digested == 2
