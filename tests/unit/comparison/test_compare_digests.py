# SPDX-License-Identifier: Apache-2.0
"""Comparing digests: every kind of fault in one of two runs is detected, and named as what it is."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.comparison.ledgers import FC2, HEADER, NAMES, STEPS, A, grown, ledger, record, value, with_trace
from tp_invariant_recipes.comparison.compare import Verdict, compare
from tp_invariant_recipes.comparison.result import comparison_json
from tp_invariant_recipes.comparison.text import parameter_line, parameter_rows, verdict_line


@given(st.sampled_from(NAMES), st.sampled_from(("gradients", "weights")), st.integers(1, STEPS), st.integers(0, 127))
def test_one_bit_of_one_digest_is_detected_and_named(name, kind, step, bit):
    digests = getattr(record(step), kind)
    other = f"{int(digests[name], 16) ^ 1 << bit:032x}"
    result = compare(A, ledger(at=step, **{kind: digests | {name: other}}))
    assert (result.verdict, result.tally.compared, result.tally.differing) == (Verdict.DIFFERENT, STEPS, 1)
    first = result.first
    phase = {"gradients": "gradient", "weights": "update"}[kind]
    assert (first.step, first.phase, first.kind, first.name) == (step, phase, kind, f"{kind}/{name}")
    assert (first.a, first.b, first.ulp) == (digests[name], other, None)
    [actual] = result.tally.parameters
    assert (actual.name, actual.kind, actual.first_step, actual.steps) == (name, kind, step, (step,))
    assert f"different at step {step}: {kind.removesuffix('s')} of {name} differs" in verdict_line(result)
    assert verdict_line(result).endswith("; 1 of 5 steps differ")


# In the order of execution: what to change, and how the first difference is named then.
ORDER = (
    ({"samples": 1}, "samples"),
    ({"tokens": 1}, "tokens"),
    ({"trace": ("forward/decoder.layers.0/output",)}, "forward/decoder.layers.0/output"),
    ({"trace": ("forward/output_layer/output",)}, "forward/output_layer/output"),
    ({"loss": "f32:40c80001"}, "loss"),
    ({"trace": ("backward/output_layer/input",)}, "backward/output_layer/input"),
    ({"trace": (f"backward/{FC2}/output",)}, f"backward/{FC2}/output"),
    ({"gradients": "decoder.final_layernorm.weight"}, "gradients/decoder.final_layernorm.weight"),
    ({"gradients": "decoder.layers.1.mlp.linear_fc2.weight"}, "gradients/decoder.layers.1.mlp.linear_fc2.weight"),
    ({"gradients": "embedding.word_embeddings.weight"}, "gradients/embedding.word_embeddings.weight"),
    ({"grad_norm": "f32:3fa00001"}, "grad_norm"),
    ({"skipped": True}, "skipped"),
    ({"learning_rate": "f64:3f33a92a30553262"}, "learning_rate"),
    ({"weights": "embedding.word_embeddings.weight"}, "weights/embedding.word_embeddings.weight"),
    ({"weights": "decoder.final_layernorm.weight"}, "weights/decoder.final_layernorm.weight"),
)


TRACED = ledger("a", traced=(3,))


@given(st.sets(st.integers(0, len(ORDER) - 1), min_size=1))
def test_the_first_in_execution_order_is_named(chosen):
    good, changes, traced = record(3), {}, []
    for number in chosen:
        for key, what in ORDER[number][0].items():
            if key == "trace":
                traced += what
            elif key in ("gradients", "weights"):
                changes[key] = changes.get(key, getattr(good, key)) | {what: value("other", what)}
            else:
                changes[key] = what
    if traced:
        changes |= with_trace(3, *traced)
    result = compare(TRACED, ledger(traced=(3,), **changes))
    assert (result.first.step, result.first.name) == (3, ORDER[min(chosen)][1])
    assert result.tally.differing == 1


INITIAL = {name: value("initial", name) for name in NAMES}
STARTED_A = ledger("a", replace(HEADER, initial=INITIAL))


@given(st.sets(st.sampled_from(NAMES), min_size=1))
def test_other_initial_weights_come_before_any_step(names):
    other = replace(HEADER, initial=INITIAL | {name: value("other", name) for name in names})
    result = compare(STARTED_A, ledger("b", other, at=1, loss="f32:40c80001"))
    first = next(name for name in NAMES if name in names)
    assert (result.verdict, result.first.step, result.first.phase, result.first.kind, result.first.name) == (
        Verdict.DIFFERENT,
        0,
        "initial",
        "initial",
        first,
    )
    assert {result.name for result in result.initial} == names
    more = f", and of {len(names) - 1} more parameters" if len(names) > 1 else ""
    assert verdict_line(result) == f"different: initial weight of {first} differs{more}; 1 of 5 steps differ"
    assert comparison_json(result)["initial"] == [name for name in NAMES if name in names]
    alone = compare(STARTED_A, ledger("b", other))  # where all steps are equal
    assert (alone.verdict, alone.exit_status, alone.first.kind) == (Verdict.DIFFERENT, 1, "initial")


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
    assert [(p.kind, p.first_step, p.steps) for p in result.tally.parameters if p.name == NAMES[1]] == [
        ("gradients", 3, (3, 4, 5)),
        ("weights", 4, (4, 5)),
    ]
    assert parameter_line(result) == "3 of 14 parameters differ, the first at step 2"


def test_gradients_and_weights_are_both_compared_where_both_runs_have_both():
    only_weights = replace(A, steps=tuple(replace(s, gradients=None) if s.step > 2 else s for s in A.steps))
    result = compare(only_weights, ledger())
    assert (result.tally.coverage["gradients"].both, result.tally.coverage["weights"].both) == (2, 5)
    assert result.steps_digested == 2
