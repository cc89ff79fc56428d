"""Comparing digests: every kind of fault in one of two runs is detected, and named as what it is."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.compare.ledgers import (
    FC1,
    FC2,
    HEADER,
    NAMES,
    NO_STATE,
    PARAMETERS,
    STEPS,
    A,
    ledger,
    record,
    value,
    with_other,
    with_trace,
)
from tp_invariant_recipes.compare.compare import Verdict, compare
from tp_invariant_recipes.compare.text import parameter_line, remarks, verdict_line
from tp_invariant_recipes.ledger.digests import in_order


def test_equal_digests_are_identical_and_reported():
    result = compare(A, ledger())
    assert (result.verdict, result.exit_status, result.first, result.parameters) == (Verdict.IDENTICAL, 0, None, ())
    assert verdict_line(result) == (
        "identical: 5 steps, loss, gradient norm, learning rate and gradients and weights of 14 parameters equal bit "
        "for bit"
    )
    assert remarks(result) == (NO_STATE,)
    assert parameter_line(result) is None


@given(st.sampled_from(NAMES), st.sampled_from(("gradients", "weights")), st.integers(1, STEPS), st.integers(0, 127))
def test_one_bit_of_one_digest_is_detected_and_named(name, kind, step, bit):
    digests = getattr(record(step), kind)
    other = f"{int(digests[name], 16) ^ 1 << bit:032x}"
    result = compare(A, ledger(at=step, **{kind: digests | {name: other}}))
    assert (result.verdict, result.steps_compared, result.steps_differing) == (Verdict.DIFFERENT, STEPS, 1)
    first = result.first
    phase = {"gradients": "gradient", "weights": "update"}[kind]
    assert (first.step, first.phase, first.kind, first.name) == (step, phase, kind, f"{kind}/{name}")
    assert (first.a, first.b, first.ulp) == (digests[name], other, None)
    [actual] = result.parameters
    assert (actual.name, actual.kind, actual.first_step, actual.steps) == (name, kind, step, (step,))
    assert f"different at step {step}: {kind.removesuffix('s')} of {name} differs" in verdict_line(result)
    assert verdict_line(result).endswith("; 1 of 5 steps differ")


@given(st.lists(st.sampled_from(NAMES), min_size=2, max_size=2, unique=True), st.sampled_from(("gradients", "weights")))
def test_two_parameters_digests_swapped(pair, kind):
    digests = getattr(record(3), kind)
    swapped = digests | {pair[0]: digests[pair[1]], pair[1]: digests[pair[0]]}
    result = compare(A, ledger(**{kind: swapped}))
    assert {parameter.name for parameter in result.parameters} == set(pair)
    nearest = max if kind == "gradients" else min  # a backward pass meets the last parameter first
    assert result.first.name == f"{kind}/{nearest(pair, key=in_order(NAMES).index)}"


def test_a_gradient_says_what_matched_before_it():
    plain = compare(A, ledger(**with_other(3, gradients=f"{FC1}.weight")))
    assert plain.first.inputs_matched is None
    assert plain.first.explanation == f"gradient of {FC1}.weight differs, loss matched"
    assert remarks(plain) == (
        NO_STATE,
        "To find the module and the operation: tpi bisect a b",
    )
    traced = dict(traced=(2, 3))
    result = compare(ledger("a", **traced), ledger(**traced, **with_other(3, gradients=f"{FC1}.weight")))
    assert result.first.inputs_matched is True
    assert result.first.explanation == (
        f"gradient of {FC1}.weight differs, the inputs of {FC1} and the gradient that arrives at it matched"
    )
    assert remarks(result) == (
        NO_STATE,
        "To see how far apart the values are: tpi bisect a b",
    )


def test_a_gradient_of_a_module_that_was_not_traced_does_not_claim_its_inputs():
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    result = compare(ledger("a", traced=(3,)), ledger(traced=(3,), **with_other(3, gradients=name)))
    assert result.first.inputs_matched is None
    assert result.first.explanation == f"gradient of {name} differs, all 64 tensors of the trace matched"


def test_the_weight_of_a_local_norm_belongs_to_the_norm():
    name = "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
    result = compare(ledger("a", traced=(3,)), ledger(traced=(3,), **with_other(3, gradients=name)))
    assert "the inputs of decoder.layers.1.input_layernorm and the gradient" in result.first.explanation


WEIGHT = f"weight of {FC1}.weight differs after the step"


@pytest.mark.parametrize(
    "at, digested, matched, words",
    (
        (3, lambda step: True, True, f"{WEIGHT}, its gradient and its value before matched: the update or the "),
        (1, lambda step: True, None, f"{WEIGHT}, its gradient matched (initial weights are not recorded by both)"),
        (3, lambda s: s != 2, None, f"{WEIGHT}, its gradient matched (weights after step 2 are not recorded by both)"),
    ),
)
def test_a_weight_says_what_matched_before_it(at, digested, matched, words):
    changes = with_other(at, weights=f"{FC1}.weight")
    result = compare(ledger("a", digested=digested), ledger(digested=digested, at=at, **changes))
    assert result.first.inputs_matched is matched
    assert result.first.explanation.startswith(words)


def test_a_weight_without_a_gradient():
    changes = with_other(3, weights=f"{FC1}.weight")
    result = compare(ledger("a", gradients=None), ledger(gradients=None, **changes))
    assert result.first.explanation == f"{WEIGHT} (digests of its gradient are not recorded by both)"


@pytest.mark.parametrize("changed, matched", (({}, True), ({"gradients": None}, None)))
def test_a_gradient_norm_says_whether_gradients_matched(changed, matched):
    result = compare(A, ledger(grad_norm="f32:3fa00001", **changed))
    assert (result.first.name, result.first.inputs_matched, result.first.ulp) == ("grad_norm", matched, 1)
    assert (", 1 ULP, all 14 gradients matched; 1 of 5" in verdict_line(result)) == bool(matched)


def test_a_loss_says_whether_the_forward_pass_matched():
    result = compare(ledger("a", traced=(3,)), ledger(traced=(3,), loss="f32:40c80001"))
    assert result.first.inputs_matched is True
    assert ", 1 ULP, all 32 traced tensors of the forward pass matched; 1 of" in verdict_line(result)
    assert not any("bisect" in sentence for sentence in remarks(result))
    plain = compare(A, ledger(loss="f32:40c80001"))
    assert plain.first.inputs_matched is None
    assert "forward pass" not in verdict_line(plain)


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
    result = compare(ledger("a", traced=(3,)), ledger(traced=(3,), **changes))
    assert (result.first.step, result.first.name) == (3, ORDER[min(chosen)][1])
    assert result.steps_differing == 1


def test_header_order_does_not_count():
    turned = replace(HEADER, parameters=PARAMETERS[::-1])
    assert compare(A, ledger(header=turned)).verdict is Verdict.IDENTICAL


@pytest.mark.parametrize(
    "change, words",
    (
        ({"shape": (16, 8)}, "has shape [8, 16] and [16, 8]"),
        ({"gradient": "bfloat16"}, "has float32 gradient and bfloat16 gradient"),
        ({"gradient": None}, "has float32 gradient and no gradient"),
        ({"weight": "float32"}, "has bfloat16 weight and float32 weight"),
    ),
)
def test_another_shape_or_dtype_is_of_the_model(change, words):
    parameters = tuple(replace(p, **change) if p.name == f"{FC2}.weight" else p for p in PARAMETERS)
    result = compare(A, ledger(header=replace(HEADER, parameters=parameters)))
    assert (result.verdict, result.exit_status, result.steps_compared) == (Verdict.DIFFERENT, 1, STEPS)
    first = result.first
    assert (first.step, first.phase, first.kind, first.name) == (0, "model", "model", f"{FC2}.weight")
    assert verdict_line(result) == f"different: {FC2}.weight {words}; 0 of 5 steps differ"


def test_a_missing_parameter_is_of_the_model():
    fewer = replace(HEADER, parameters=PARAMETERS[:-1])
    without = {kind: {n: d for n, d in getattr(record(3), kind).items() if n != NAMES[-1]} for kind in ("gradients",)}
    b = ledger(header=fewer, **without)
    result = compare(A, b)
    assert (result.verdict, result.first.kind, len(result.model)) == (Verdict.DIFFERENT, "model", 1)
    assert verdict_line(result).startswith(f"different: {NAMES[-1]} is in a and not in b; ")
    assert verdict_line(compare(b, A)).startswith(f"different: {NAMES[-1]} is in a and not in b; ")


def test_several_differences_of_the_models_are_counted():
    result = compare(A, ledger(header=replace(HEADER, parameters=PARAMETERS[3:])))
    assert len(result.model) == 3
    assert "; 2 more such differences of the models; " in verdict_line(result)


def test_models_do_not_make_an_unfinished_run_comparable():
    result = compare(ledger("a", steps=0), ledger(header=replace(HEADER, parameters=PARAMETERS[:-1])))
    assert (result.verdict, result.model) == (Verdict.NOT_COMPARABLE, ())


@pytest.mark.parametrize("who", ("a", "b", "both"))
@pytest.mark.parametrize("kind, phase", (("weights", "update"), ("gradients", "gradient")))
def test_replicas_that_disagree_are_never_identical(who, kind, phase):
    diverged = {"diverged": ((kind, f"{FC1}.weight", ((0, 2), (1,))),)}
    a = ledger("a", **(diverged if who != "b" else {}))
    b = ledger("b", **(diverged if who != "a" else {}))
    result = compare(a, b)
    assert (result.verdict, result.exit_status, result.steps_differing) == (Verdict.DIFFERENT, 1, 1)
    first = result.first
    assert (first.step, first.phase, first.kind, first.name) == (3, phase, "replicas", f"{kind}/{FC1}.weight")
    named = "a" if who == "both" else who
    assert verdict_line(result).startswith(
        f"different at step 3: {named}: replicas of {kind} {FC1}.weight disagree: ranks 0, 2 | 1; "
    )


def test_replicas_stand_where_their_parameter_does():
    diverged = (("gradients", "embedding.word_embeddings.weight", ((0,), (1,))),)
    changes = with_other(3, gradients=f"{FC1}.weight")
    result = compare(A, ledger(diverged=diverged, **changes))
    assert result.first.name == f"gradients/{FC1}.weight"  # nearer to the loss
    assert compare(A, ledger(diverged=diverged, **with_other(3, weights=NAMES[0]))).first.kind == "replicas"


def test_replicas_of_a_traced_tensor():
    diverged = (("forward", f"{FC1}/output", ((0,), (1,))),)
    result = compare(ledger("a", traced=(3,)), ledger(traced=(3,), diverged=diverged))
    assert (result.first.kind, result.first.phase, result.first.name) == (
        "replicas",
        "forward",
        f"forward/{FC1}/output",
    )


def test_replicas_of_what_neither_run_lists_are_not_overlooked():
    assert compare(A, ledger(diverged=(("weights", "unknown", ((0,), (1,))),))).first.name == "weights/unknown"


def test_replicas_beyond_the_common_steps_are_reported():
    result = compare(ledger("a", steps=3), ledger(at=5, diverged=(("weights", NAMES[0], ((0,), (1,))),)))
    assert result.verdict is Verdict.IDENTICAL
    assert remarks(result) == ("b: replicas disagree at step 5, which is not compared.", NO_STATE)
