"""Comparing master weights, moments and clipped gradients, also with ledgers that have none."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.compare.ledgers import FC1, NAMES, PARAMETERS, STEPS, record, value
from tests.unit.compare.ledgers import HEADER as BARE
from tp_invariant_recipes.compare.compare import Verdict, compare
from tp_invariant_recipes.compare.comparison_json import comparison_json
from tp_invariant_recipes.compare.text import compared_values, parameter_rows, remarks, verdict_line
from tp_invariant_recipes.ledger.reader import Ledger, parse
from tp_invariant_recipes.ledger.record import encode_header, encode_step

HEADER = replace(BARE, parameters=tuple(replace(p, master="float32") for p in PARAMETERS))
STATES = ("exp_avg", "exp_avg_sq", "step")
FC1 = f"{FC1}.weight"


def line(step, *, state, bare=False, **changes):
    if bare:
        return replace(record(step), **changes)
    values = dict(
        masters={name: value(step, "master", name) for name in NAMES},
        weights=None,
    )
    if state:
        values["clipped"] = {name: value(step, "clipped", name) for name in NAMES}
        values["moments"] = {f"{one}/{name}": value(step, one, name) for one in STATES for name in NAMES}
    return replace(record(step), **values | changes)


def ledger_with_state(name="b", *, bare=False, state=(2, 5), at=2, **changes):
    """Of step `at` these changes: kind → names of digests that are others."""
    records = []
    for step in range(1, STEPS + 1):
        one = line(step, state=step in state, bare=bare)
        if step == at:
            others = {k: getattr(one, k) | dict.fromkeys(v, "f" * 32) for k, v in changes.items() if k != "diverged"}
            one = replace(one, **others, diverged=changes.get("diverged", ()))
        records.append(one)
    return Ledger(BARE if bare else HEADER, tuple(records), Path(name) / "ledger.jsonl", torn=False)


A = ledger_with_state("a")


def test_the_verdict_says_what_was_compared():
    found = compare(A, ledger_with_state())
    assert verdict_line(found) == (
        "identical: 5 steps, loss, gradient norm, learning rate, gradients and master weights of 14 parameters and "
        "clipped gradients and optimizer moments of 14 parameters (at steps 2 and 5) equal bit for bit"
    )
    assert remarks(found) == ()
    assert comparison_json(found)["coverage"]["moments"] == {"both": 2, "only_a": 0, "only_b": 0}


def test_and_what_was_not():
    never = compare(ledger_with_state("a", state=()), ledger_with_state(state=()))
    assert remarks(never) == (
        "Not compared: clipped gradients and optimizer moments, of which neither run has digests at a common step.",
    )
    alone = compare(ledger_with_state("a", state=(2,)), ledger_with_state(state=()))
    assert remarks(alone) == ("Not compared: clipped gradients and optimizer moments, of which b has no digests.",)
    apart = compare(ledger_with_state("a", state=(2,)), ledger_with_state(state=(3,)))
    assert remarks(apart) == (
        "Digests of clipped gradients and optimizer moments are compared at 0 of 5 steps; a alone has them at 1; b "
        "alone has them at 1.",
    )


@pytest.mark.parametrize(
    "kind, name, words",
    (
        ("clipped", FC1, f"gradient of {FC1} differs as the optimizer reads it, it matched before clipping"),
        (
            "moments",
            f"exp_avg/{FC1}",
            f"exp_avg of {FC1} in the optimizer differs after the step, its gradient matched",
        ),
        (
            "masters",
            FC1,
            f"master weight of {FC1} differs after the step, its gradient, its moments and its value before",
        ),
    ),
)
def test_the_first_difference_is_named_as_what_it_is(kind, name, words):
    found = compare(A, ledger_with_state(**{kind: (name,)}))
    assert (found.verdict, found.first.step, found.first.phase) == (Verdict.DIFFERENT, 2, "update")
    assert (found.first.kind, found.first.name) == (kind, f"{kind}/{name}")
    assert words in verdict_line(found)
    [row] = parameter_rows(found)
    column = {"clipped": row.gradient, "moments": row.moments, "masters": row.weight}[kind]
    assert (row.name, column, row.steps) == (FC1, 2, 1)


def test_the_update_comes_in_the_order_of_its_execution():
    kinds = {"masters": (FC1,), "moments": (f"step/{FC1}",), "clipped": (FC1,)}
    for kind in ("clipped", "moments", "masters"):
        assert compare(A, ledger_with_state(**kinds)).first.kind == kind
        del kinds[kind]


def test_weights_that_do_not_follow_are_a_difference_even_in_both_runs():
    wrong = ledger_with_state(diverged=(("copies", FC1, ((1, 3),)),))
    found = compare(A, wrong)
    assert (found.verdict, found.first.kind) == (Verdict.DIFFERENT, "copies")
    assert f"b: weights of {FC1} are not its master weights rounded, on ranks 1, 3" in verdict_line(found)
    assert compare(wrong, wrong).verdict is Verdict.DIFFERENT
    assert compare(wrong, wrong, repetition=True).verdict is Verdict.IDENTICAL


def test_master_weights_against_a_ledger_without_are_not_compared_and_not_different():
    found = compare(A, ledger_with_state(bare=True))
    assert found.verdict is Verdict.IDENTICAL
    assert remarks(found) == (
        "Not compared: clipped gradients, optimizer moments and master weights, of which b has no digests; "
        "weights, of which a has no digests.",
    )
    assert compared_values(found) == "loss, gradient norm, learning rate and gradients of 14 parameters"
    assert compare(A, ledger_with_state(bare=True, gradients=(FC1,))).verdict is Verdict.DIFFERENT


def test_clipped_gradients_that_nothing_clipped_take_no_room():
    same = replace(line(1, state=False), clipped=record(1).gradients)
    text = encode_step(same, HEADER)
    assert b'"clipped": "gradients"' in text
    assert parse(Path("x"), encode_header(HEADER) + text).steps == (same,)


@pytest.mark.parametrize(
    "change, words",
    (
        ((b'"moments": {"exp_avg"', b'"moments": {"exp/avg"'), "is not the name of a tensor in an optimizer"),
        ((b'"clipped": {"model"', b'"clipped": "gradients", "x": {"model"'), None),
        ((b'"clipped": {"model"', b'"clipped": "weights", "x": {"model"'), "clipped is not a dict"),
        ((b'"gradients": {', b'"gradient": {'), None),
        ((b'"masters": {"model": "', b'"masters": {"model": "0'), "the line was altered"),
    ),
)
def test_what_is_altered_is_refused(change, words):
    whole = encode_header(HEADER) + encode_step(line(1, state=True), HEADER)
    changed = encode_header(HEADER) + encode_step(line(1, state=True), HEADER).replace(*change, 1)
    assert changed != whole
    if words is None:
        parse(Path("x"), changed)
        return
    with pytest.raises(Exception, match=words):
        parse(Path("x"), changed)


def test_a_state_that_not_every_parameter_has():
    some = {f"momentum/{name}": value(name) for name in NAMES[:3]} | {
        f"exp_avg/{name}": value(name) for name in NAMES[3:]
    }
    one = replace(line(1, state=False), moments=some)
    assert parse(Path("x"), encode_header(HEADER) + encode_step(one, HEADER)).steps == (one,)
