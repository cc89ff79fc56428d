"""Comparing master weights, moments and clipped gradients, also with ledgers that have none."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.compare.ledgers import FC1, NAMES, PARAMETERS, STEPS, record, value
from tests.unit.compare.ledgers import HEADER as BARE
from tp_invariant_recipes.compare.compare import Verdict, compare
from tp_invariant_recipes.compare.comparison_json import comparison_json
from tp_invariant_recipes.compare.text import parameter_rows, remarks, verdict_line
from tp_invariant_recipes.errors import LedgerError
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
        values["moments"] = {f"{state}/{name}": value(step, state, name) for state in STATES for name in NAMES}
    return replace(record(step), **values | changes)


def ledger_with_state(name="b", *, bare=False, state=(2, 5), at=2, **changes):
    """Of step `at` these changes: kind → names of digests that are others."""
    records = []
    for step in range(1, STEPS + 1):
        single = line(step, state=step in state, bare=bare)
        if step == at:
            others = {k: getattr(single, k) | dict.fromkeys(v, "f" * 32) for k, v in changes.items() if k != "diverged"}
            single = replace(single, **others, diverged=changes.get("diverged", ()))
        records.append(single)
    return Ledger(BARE if bare else HEADER, tuple(records), Path(name) / "ledger.jsonl", torn=False)


A = ledger_with_state("a")


def test_the_verdict_says_what_was_compared():
    comparison = compare(A, ledger_with_state())
    assert verdict_line(comparison) == (
        "identical: 5 steps, loss, gradient norm, learning rate, gradients and master weights of 14 parameters and "
        "clipped gradients and optimizer moments of 14 parameters (at steps 2 and 5) equal bit for bit"
    )
    assert remarks(comparison) == ()
    assert comparison_json(comparison)["coverage"]["moments"] == {"both": 2, "only_a": 0, "only_b": 0}


def test_and_what_was_not():
    never = compare(ledger_with_state("a", state=()), ledger_with_state(state=()))
    assert remarks(never) == (
        "Not compared: clipped gradients and optimizer moments, of which neither run has digests at a common step.",
    )
    alone = compare(ledger_with_state("a", state=(2,)), ledger_with_state(state=()))
    assert remarks(alone) == ("Not compared: clipped gradients and optimizer moments, of which b has no digests.",)
    separate = compare(ledger_with_state("a", state=(2,)), ledger_with_state(state=(3,)))
    assert remarks(separate) == (
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
    comparison = compare(A, ledger_with_state(**{kind: (name,)}))
    assert (comparison.verdict, comparison.first.step, comparison.first.phase) == (Verdict.DIFFERENT, 2, "update")
    assert (comparison.first.kind, comparison.first.name) == (kind, f"{kind}/{name}")
    assert words in verdict_line(comparison)
    [row] = parameter_rows(comparison)
    column = {"clipped": row.gradient, "moments": row.moments, "masters": row.weight}[kind]
    assert (row.name, column, row.steps) == (FC1, 2, 1)


def test_the_update_comes_in_the_order_of_its_execution():
    kinds = {"masters": (FC1,), "moments": (f"step/{FC1}",), "clipped": (FC1,)}
    for kind in ("clipped", "moments", "masters"):
        assert compare(A, ledger_with_state(**kinds)).first.kind == kind
        del kinds[kind]


def test_weights_that_do_not_follow_are_a_difference_even_in_both_runs():
    wrong = ledger_with_state(diverged=(("copies", FC1, ((1, 3),)),))
    comparison = compare(A, wrong)
    assert (comparison.verdict, comparison.first.kind) == (Verdict.DIFFERENT, "copies")
    assert f"b: weights of {FC1} are not its master weights rounded, on ranks 1, 3" in verdict_line(comparison)
    assert compare(wrong, wrong).verdict is Verdict.DIFFERENT
    assert compare(wrong, wrong, repetition=True).verdict is Verdict.IDENTICAL


def test_other_master_weights_are_another_model():
    bare = compare(A, ledger_with_state(bare=True))
    assert (bare.verdict, len(bare.model)) == (Verdict.DIFFERENT, 14)
    single = replace(PARAMETERS[3], master="bfloat16")
    header = replace(HEADER, parameters=(*HEADER.parameters[:3], single, *HEADER.parameters[4:]))
    comparison = compare(A, replace(ledger_with_state(), header=header))
    assert verdict_line(comparison).startswith(
        f"different: {single.name} has float32 master weight and bfloat16 master weight; 0 of 5 steps differ"
    )


ALL = {f"{state}/{name}" for state in STATES for name in NAMES}
# Moments of a step in one run -> how many of them only one run has, and the first in the order of their names.
MOMENTS = {
    "null": (frozenset(), len(ALL), "a"),
    "renamed": (ALL - {f"step/{FC1}"} | {f"steps/{FC1}"}, 2, "a"),
    "in part": (ALL - {f"exp_avg/{FC1}", f"exp_avg/{NAMES[0]}"}, 2, "a"),
    "more": (ALL | {f"exp_avg/{name}x" for name in NAMES[:3]}, 3, "b"),
}


@pytest.mark.parametrize("names, count, who", MOMENTS.values(), ids=MOMENTS)
def test_moments_that_only_one_run_has_are_not_comparable(names, count, who):
    b = ledger_with_state()
    values = A.steps[4].moments
    b = replace(b, steps=(*b.steps[:4], replace(b.steps[4], moments={n: values.get(n, "f" * 32) for n in names})))
    comparison = compare(A, b)
    first = min(ALL ^ names)
    more = f"; and {count - 1} more"
    assert verdict_line(comparison) == f"not comparable: only {who} has moments/{first}, at step 5{more}"
    assert (comparison.exit_status, len(comparison.unmatched)) == (2, count)
    assert comparison_json(comparison)["unmatched"][0] == {"name": f"moments/{first}", "step": 5, "run": who}
    # What both have at every step is what the line of a difference, or of a verdict, may count.
    assert comparison.tensors["moments"] == ALL & names
    different = compare(A, replace(b, steps=(replace(b.steps[0], loss="f32:40c80001"), *b.steps[1:])))
    assert different.verdict is Verdict.DIFFERENT
    assert remarks(different)[0] == f"Not compared: only {who} has moments/{first}, at step 5{more}."


@pytest.mark.parametrize(
    "kind, alone", (("moments", True), ("clipped", True), ("masters", True), ("gradients", True), ("nothing", False))
)
def test_a_kind_that_a_run_always_records_beside_another_is_not_comparable_without(kind, alone):
    """At step 2 both runs have all kinds: a run chooses its steps, and not the kinds of a step."""
    b = ledger_with_state()
    gone = {} if kind == "nothing" else {kind: None}
    b = replace(b, steps=(b.steps[0], replace(b.steps[1], **gone), *b.steps[2:]))
    for result in (compare(A, b), compare(b, A)):
        assert result.verdict is (Verdict.NOT_COMPARABLE if alone else Verdict.IDENTICAL)
        assert [item.name for item in result.unmatched] == [kind] * alone


@pytest.mark.parametrize("ranks", ([], [[]], [[0], []]))
def test_replicas_that_disagree_on_no_rank_are_refused(ranks):
    single = line(1, state=False, diverged=(("gradients", FC1, ((0,), (1,))),))
    whole = encode_header(HEADER) + encode_step(single, HEADER)
    assert parse(Path("x"), whole).steps == (single,)
    with pytest.raises(LedgerError, match="diverged: no ranks"):
        parse(Path("x"), whole.replace(b'"ranks": [[0], [1]]', f'"ranks": {ranks}'.encode()))


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
    moments = {f"momentum/{name}": value(name) for name in NAMES[:3]} | {
        f"exp_avg/{name}": value(name) for name in NAMES[3:]
    }
    single = replace(line(1, state=False), moments=moments)
    assert parse(Path("x"), encode_header(HEADER) + encode_step(single, HEADER)).steps == (single,)
