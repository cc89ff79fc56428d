# SPDX-License-Identifier: Apache-2.0
"""Comparing master weights, moments and clipped gradients, also with ledgers that have none."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.comparison.ledgers import FC1, NAMES, PARAMETERS, STEPS, record, value
from tests.unit.comparison.ledgers import HEADER as BARE
from tp_invariant_recipes.comparison.comparability import problem, remark
from tp_invariant_recipes.comparison.compare import Verdict, compare
from tp_invariant_recipes.comparison.text import parameter_rows
from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.record import encode_header, encode_step
from tp_invariant_recipes.ledger.stream import parse

HEADER = replace(BARE, parameters=tuple(replace(p, master="float32") for p in PARAMETERS))
STATES = ("exp_avg", "exp_avg_sq", "step")
FC1 = f"{FC1}.weight"


def line(step, *, state, bare=False, **changes):
    if bare:
        return replace(record(step), **changes)
    values = dict(masters={name: value(step, "master", name) for name in NAMES}, weights=None)
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


@pytest.mark.parametrize("kind, name", (("clipped", FC1), ("moments", f"exp_avg/{FC1}"), ("masters", FC1)))
def test_the_table_of_parameters_has_a_column_for_each_kind(kind, name):
    comparison = compare(A, ledger_with_state(**{kind: (name,)}))
    [row] = parameter_rows(comparison)
    column = {"clipped": row.gradient, "moments": row.moments, "masters": row.weight}[kind]
    assert (row.name, column, row.steps) == (FC1, 2, 1)


def test_a_run_that_repeats_itself_does_so_where_weights_do_not_follow():
    wrong = ledger_with_state(diverged=(("copies", FC1, ((1, 3),)),))
    assert compare(wrong, wrong).verdict is Verdict.DIFFERENT
    assert compare(wrong, wrong, repetition=True).verdict is Verdict.IDENTICAL


def test_moments_that_both_runs_have_at_every_step_are_counted():
    """The line of a difference, or of a verdict, may count them."""
    b = ledger_with_state()
    moments = {name: digest for name, digest in A.steps[4].moments.items() if name != f"step/{FC1}"}
    b = replace(b, steps=(*b.steps[:4], replace(b.steps[4], moments=moments)))
    assert compare(A, b).tally.tensors["moments"] == moments.keys()


@pytest.mark.parametrize("ranks", ([], [[]], [[0], []]))
def test_replicas_that_disagree_on_no_rank_are_refused(ranks):
    single = line(1, state=False, diverged=(("gradients", FC1, ((0,), (1,))),))
    whole = encode_header(HEADER) + encode_step(single, HEADER)
    assert parse(Path("x"), whole).steps == (single,)
    with pytest.raises(LedgerError, match=r"diverged\.0\.ranks.*at least 1 item"):
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


# What a run goes on from, against its ledger.

LINE = line(4, state=True)
LOADED = replace(LINE, weights={name: value(name) for name in NAMES})


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
