"""Comparing digests and traces: every kind of fault in one of two runs is detected, and named as what it is."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from typer.testing import CliRunner

from tp_invariant_recipes.cli.compare import compare as compare_command
from tp_invariant_recipes.compare.compare import Coverage, TraceCoverage, Verdict, compare
from tp_invariant_recipes.compare.text import (
    comparison_json,
    parameter_line,
    parameter_rows,
    proved,
    remarks,
    verdict_line,
)
from tp_invariant_recipes.ledger import dumps
from tp_invariant_recipes.ledger.digests import Parameter, Traced, in_order, tensor_digest
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.record import Header, LedgerWriter, StepRecord

STEPS = 5
LAYERS = 2
PARTS = (
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
)
NAMES = (
    "embedding.word_embeddings.weight",
    *(f"decoder.layers.{layer}.{part}" for layer in range(LAYERS) for part in PARTS),
    "decoder.final_layernorm.weight",
)
FC1 = "decoder.layers.1.mlp.linear_fc1"
FC2 = "decoder.layers.0.mlp.linear_fc2"
PARAMETERS = tuple(Parameter(name, (8, 16), "float32", "bfloat16") for name in NAMES)
HEADER = Header(identity={"rng.seed": 1234}, parameters=PARAMETERS)

# Modules in the order in which a forward pass enters them; a container's children come before its output.
LAYER = (
    ("self_attention", ("input_layernorm", "self_attention.linear_qkv", "self_attention.core_attention")),
    ("mlp", ("pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2")),
)


def value(*what: object, dtype: str = "bfloat16", shape: tuple[int, ...] = (4, 2, 8)) -> str:
    """A digest that depends on all of `what`."""
    return tensor_digest((hash(what), len(what)), dtype, shape)


def forward_modules() -> list[tuple[str, str]]:
    """(module, tensor) in the order of execution."""
    entries = [("embedding.word_embeddings", "input"), ("embedding.word_embeddings", "output")]
    for layer in range(LAYERS):
        name = f"decoder.layers.{layer}"
        entries.append((name, "input"))
        for _, modules in LAYER:
            entries += [(f"{name}.{module}", tensor) for module in modules for tensor in ("input", "output")]
        entries.append((name, "output"))
    return [*entries, ("output_layer", "input"), ("output_layer", "output")]


def trace(step: int) -> tuple[Traced, ...]:
    forward = [("forward", module, tensor) for module, tensor in forward_modules()]
    flipped = {"input": "output", "output": "input"}
    backward = [("backward", module, flipped[tensor]) for module, tensor in reversed(forward_modules())]
    return tuple(Traced(*key, "bfloat16", (4, 2, 8), value(step, *key)) for key in forward + backward)


def record(step: int, digested: bool = True, traced: bool = False, **changes) -> StepRecord:
    values = dict(samples=4 * step, tokens=256, loss="f32:40c80000", grad_norm="f32:3fa00000")
    if digested:
        values["gradients"] = {name: value(step, "gradient", name) for name in NAMES}
        values["weights"] = {name: value(step, "weight", name) for name in NAMES}
    if traced:
        values["trace"] = trace(step)
    return StepRecord(**{"step": step, "learning_rate": "f64:3f33a92a30553261", **values, **changes})


def ledger(name="b", header=HEADER, steps=STEPS, digested=lambda step: True, traced=(), at=3, **changes) -> Ledger:
    """A ledger in memory; `changes` are those of step `at`."""
    records = (
        record(step, digested(step), step in traced, **(changes if step == at else {})) for step in range(1, steps + 1)
    )
    return Ledger(header, tuple(records), Path(name) / "ledger.jsonl", torn=False)


A = ledger("a")


def with_other(step: int, **names: str) -> dict[str, dict[str, str]]:
    """The changes of a step where the digests of these parameters are others: kind → parameter."""
    good = record(step)
    return {kind: getattr(good, kind) | {name: value("other", name)} for kind, name in names.items()}


def with_trace(step: int, *names: str, digest: str | None = "0" * 32) -> dict[str, tuple[Traced, ...]]:
    entries = [
        replace(entry, digest=digest) if f"{entry.direction}/{entry.module}/{entry.tensor}" in names else entry
        for entry in trace(step)
    ]
    assert entries != list(trace(step))
    return {"trace": tuple(entries)}


def test_equal_digests_are_identical_and_said():
    result = compare(A, ledger())
    assert (result.verdict, result.exit_status, result.first, result.parameters) == (Verdict.IDENTICAL, 0, None, ())
    assert verdict_line(result) == (
        "identical: 5 steps, loss, gradient norm, learning rate and gradients and weights of 14 parameters equal bit "
        "for bit"
    )
    assert remarks(result) == ()
    assert parameter_line(result) is None


@given(st.sampled_from(NAMES), st.sampled_from(("gradients", "weights")), st.integers(1, STEPS), st.integers(0, 127))
def test_one_bit_of_one_digest_is_found_and_named(name, kind, step, bit):
    digests = getattr(record(step), kind)
    other = f"{int(digests[name], 16) ^ 1 << bit:032x}"
    result = compare(A, ledger(at=step, **{kind: digests | {name: other}}))
    assert (result.verdict, result.steps_compared, result.steps_differing) == (Verdict.DIFFERENT, STEPS, 1)
    first = result.first
    phase = {"gradients": "gradient", "weights": "update"}[kind]
    assert (first.step, first.phase, first.kind, first.name) == (step, phase, kind, f"{kind}/{name}")
    assert (first.a, first.b, first.ulp) == (digests[name], other, None)
    [found] = result.parameters
    assert (found.name, found.kind, found.first_step, found.steps) == (name, kind, step, (step,))
    assert f"different at step {step}: {kind.removesuffix('s')} of {name} differs" in verdict_line(result)
    assert verdict_line(result).endswith("; 1 of 5 steps differ")


@given(st.lists(st.sampled_from(NAMES), min_size=2, max_size=2, unique=True), st.sampled_from(("gradients", "weights")))
def test_two_parameters_digests_swapped(pair, kind):
    digests = getattr(record(3), kind)
    swapped = digests | {pair[0]: digests[pair[1]], pair[1]: digests[pair[0]]}
    result = compare(A, ledger(**{kind: swapped}))
    assert {found.name for found in result.parameters} == set(pair)
    nearest = max if kind == "gradients" else min  # a backward pass meets the last parameter first
    assert result.first.name == f"{kind}/{nearest(pair, key=in_order(NAMES).index)}"


def test_a_gradient_says_what_matched_before_it():
    plain = compare(A, ledger(**with_other(3, gradients=f"{FC1}.weight")))
    assert plain.first.inputs_matched is None
    assert plain.first.explanation == f"gradient of {FC1}.weight differs, loss matched"
    assert remarks(plain) == ("To find the module and the operation: tpi bisect a b",)
    traced = dict(traced=(2, 3))
    result = compare(ledger("a", **traced), ledger(**traced, **with_other(3, gradients=f"{FC1}.weight")))
    assert result.first.inputs_matched is True
    assert result.first.explanation == (
        f"gradient of {FC1}.weight differs, the inputs of {FC1} and the gradient that arrives at it matched"
    )
    assert remarks(result) == ("To see how far apart the values are: tpi bisect a b",)


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
@pytest.mark.parametrize("of, phase", (("weights", "update"), ("gradients", "gradient")))
def test_replicas_that_disagree_are_never_identical(who, of, phase):
    diverged = {"diverged": ((of, f"{FC1}.weight", ((0, 2), (1,))),)}
    a = ledger("a", **(diverged if who != "b" else {}))
    b = ledger("b", **(diverged if who != "a" else {}))
    result = compare(a, b)
    assert (result.verdict, result.exit_status, result.steps_differing) == (Verdict.DIFFERENT, 1, 1)
    first = result.first
    assert (first.step, first.phase, first.kind, first.name) == (3, phase, "replicas", f"{of}/{FC1}.weight")
    named = "a" if who == "both" else who
    assert verdict_line(result).startswith(
        f"different at step 3: {named}: replicas of {of} {FC1}.weight disagree: ranks 0, 2 | 1; "
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


def test_replicas_beyond_the_common_steps_are_said():
    result = compare(ledger("a", steps=3), ledger(at=5, diverged=(("weights", NAMES[0], ((0,), (1,))),)))
    assert result.verdict is Verdict.IDENTICAL
    assert remarks(result) == ("b: replicas disagree at step 5, which is not compared.",)


# Traces.

TRACED = dict(traced=(1, 2, 3))


def traced_pair(*names: str, at: int = 3, a: dict | None = None, **changes):
    return compare(
        ledger("a", **TRACED, at=at, **(a or {})),
        ledger("b", **TRACED, at=at, **{**with_trace(at, *names), **changes}),
    )


@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_an_output_whose_inputs_and_weights_matched(direction):
    name = f"{direction}/{FC2}/output"
    result = traced_pair(name)
    first = result.first
    assert (first.step, first.phase, first.kind, first.name) == (3, direction, direction, name)
    assert first.inputs_matched is True
    assert verdict_line(result) == (
        f"different at step 3: {direction} of {FC2}: output differs, its inputs and weights matched; "
        "1 of 5 steps differ"
    )


def test_at_step_1_the_weights_are_the_initial_ones():
    name = f"forward/{FC2}/output"
    assert traced_pair(name, at=1).first.explanation.endswith(
        "output differs, its inputs matched (initial weights are not recorded by both)"
    )
    a = ledger("a", STARTED, traced=(1,))
    b = ledger("b", STARTED, traced=(1,), at=1, **with_trace(1, name))
    assert compare(a, b).first.explanation.endswith("output differs, its inputs and weights matched")


INITIAL = {name: value("initial", name) for name in NAMES}
STARTED = replace(HEADER, initial=INITIAL)


@given(st.sets(st.sampled_from(NAMES), min_size=1))
def test_other_initial_weights_come_before_any_step(names):
    other = replace(HEADER, initial=INITIAL | {name: value("other", name) for name in names})
    result = compare(ledger("a", STARTED), ledger("b", other, at=1, loss="f32:40c80001"))
    first = next(name for name in NAMES if name in names)
    assert (result.verdict, result.first.step, result.first.phase, result.first.kind, result.first.name) == (
        Verdict.DIFFERENT,
        0,
        "initial",
        "initial",
        first,
    )
    assert {found.name for found in result.initial} == names
    more = f", and of {len(names) - 1} more parameters" if len(names) > 1 else ""
    assert verdict_line(result) == f"different: initial weight of {first} differs{more}; 1 of 5 steps differ"
    assert comparison_json(result)["initial"] == [name for name in NAMES if name in names]


def test_initial_weights_that_one_run_lacks_are_no_difference():
    assert compare(ledger("a", STARTED), ledger("b")).verdict is Verdict.IDENTICAL


def test_weights_that_are_not_recorded_are_said():
    never = dict(digested=lambda step: step != 2)
    result = compare(
        ledger("a", **TRACED, **never), ledger("b", **TRACED, **never, **with_trace(3, f"forward/{FC2}/output"))
    )
    assert result.first.explanation.endswith("its inputs matched (weights after step 2 are not recorded by both)")


def test_a_module_without_weights_has_none_to_match():
    name = "forward/decoder.layers.1.self_attention.core_attention/output"
    assert traced_pair(name).first.explanation.endswith("core_attention: output differs, its inputs matched")


def test_a_tied_output_layer_has_the_weights_of_the_embedding():
    assert traced_pair("forward/output_layer/output").first.explanation.endswith("its inputs and weights matched")


def test_a_container_says_that_its_modules_matched():
    result = traced_pair("forward/decoder.layers.0/output")
    assert result.first.explanation == (
        "forward of decoder.layers.0: output differs, its inputs and weights matched, and so did what was traced "
        "inside it"
    )


def test_an_input_tells_after_which_tensor_it_arose():
    result = traced_pair("forward/decoder.layers.1.pre_mlp_layernorm/input", f"forward/{FC1}/output")
    assert result.first.inputs_matched is None
    assert result.first.explanation == (
        "forward of decoder.layers.1.pre_mlp_layernorm: input differs, all before it matched: the difference arises "
        "after output of decoder.layers.1.self_attention.core_attention, outside traced modules"
    )


def test_a_second_input_did_not_arise_from_the_first():
    name = "decoder.layers.0.self_attention.core_attention"
    runs = []
    for digest in ("0" * 32, "1" * 32):
        entries = list(trace(3))
        at = next(n for n, entry in enumerate(entries) if entry.module == name)
        entries.insert(at + 1, replace(entries[at], tensor="input.1", digest=digest))
        runs.append(ledger(traced=(3,), trace=tuple(entries)))
    assert compare(*runs).first.explanation == (
        f"forward of {name}: input.1 differs, all before it matched: the difference arises after output of "
        "decoder.layers.0.self_attention.linear_qkv, outside traced modules"
    )


def test_the_first_input_of_all_comes_from_outside():
    words = traced_pair("forward/embedding.word_embeddings/input").first.explanation
    assert words.endswith("nothing was compared before it: the difference is in what enters the model")


def test_an_output_that_differs_with_its_input_names_the_input():
    result = traced_pair(f"forward/{FC2}/input", f"forward/{FC2}/output")
    assert result.first.name == f"forward/{FC2}/input"


def test_an_input_listed_after_the_output_is_still_looked_at():
    # A's order decides what is first; what the module was given counts wherever it is listed.
    name = f"forward/{FC2}"
    turned = sorted(trace(3), key=lambda entry: f"{entry.direction}/{entry.module}/{entry.tensor}" == f"{name}/input")
    result = traced_pair(f"{name}/input", f"{name}/output", a={"trace": tuple(turned)})
    assert (result.first.name, result.first.inputs_matched) == (f"{name}/output", False)
    assert "output differs, and so do its inputs" in result.first.explanation


def test_an_input_without_a_digest_is_not_known_to_match():
    gone = with_trace(3, f"forward/{FC2}/input", digest=None)
    changed = tuple(
        replace(e, digest="0" * 32) if (e.direction, e.module, e.tensor) == ("forward", FC2, "output") else e
        for e in gone["trace"]
    )
    result = compare(ledger("a", **TRACED), ledger(**TRACED, trace=changed))
    assert (result.first.name, result.first.inputs_matched) == (f"forward/{FC2}/output", None)
    assert "output differs, and not all its inputs have digests" in result.first.explanation
    assert "1 traced tensors have no digest that two layouts share: not compared." in remarks(result)


def test_another_dtype_or_shape_is_said():
    changed = tuple(
        replace(e, dtype="float32", shape=(8, 2, 8), digest="0" * 32)
        if (e.direction, e.module, e.tensor) == ("forward", FC2, "output")
        else e
        for e in trace(3)
    )
    result = compare(ledger("a", **TRACED), ledger(**TRACED, trace=changed))
    assert ": output differs (bfloat16 [4, 2, 8] and float32 [8, 2, 8]), its inputs and" in result.first.explanation


def test_the_common_modules_are_compared_and_the_others_counted():
    fewer = tuple(entry for entry in trace(3) if entry.module != FC2)
    result = compare(ledger("a", traced=(3,)), ledger(traced=(3,), trace=fewer))
    assert result.verdict is Verdict.IDENTICAL
    assert result.trace == TraceCoverage(compared=60, only_a=4, only_b=0, undigested=0)
    assert "4 traced tensors of a are not in the trace of b: not compared." in remarks(result)
    assert "60 tensors of the trace (at 1 of 5 steps)" in verdict_line(result)
    other = tuple(replace(e, digest="0" * 32) if e.module == "output_layer" else e for e in fewer)
    assert (
        compare(ledger("a", traced=(3,)), ledger(traced=(3,), trace=other)).first.name == "forward/output_layer/input"
    )


def test_a_module_that_is_called_twice_has_two_entries():
    twice = (*trace(3), *(e for e in trace(3) if e.module == FC2))
    other = (*twice[:-1], replace(twice[-1], digest="0" * 32))
    result = compare(ledger("a", traced=(3,), trace=twice), ledger(traced=(3,), trace=other))
    assert result.first.name == f"backward/{FC2}#2/output"
    assert "its inputs and weights matched" in result.first.explanation


def test_a_trace_of_one_run_alone():
    result = compare(ledger("a", traced=(2, 3)), ledger())
    assert result.verdict is Verdict.IDENTICAL
    assert remarks(result) == ("Traces are compared at 0 of 5 steps; a alone has them at 2.",)
    assert "trace" not in verdict_line(result)


# What only one of the runs recorded.

NONE = lambda step: False  # noqa: E731
BARE = replace(HEADER, parameters=())


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
    assert remarks(result) == ("Digests of gradients and weights are compared at 2 of 5 steps; a alone has them at 3.",)
    never_both = compare(ledger("a", digested=lambda s: s % 2 == 0), ledger(digested=lambda s: s % 2 == 1))
    assert proved(never_both) == "loss, gradient norm and learning rate"
    assert remarks(never_both) == (
        "Digests of gradients and weights are compared at 0 of 5 steps; a alone has them at 2; b alone has them at 3.",
    )


def test_a_difference_at_a_step_that_one_run_did_not_record_is_not_seen():
    even = dict(digested=lambda step: step % 2 == 0)
    assert compare(ledger("a", **even), ledger(**with_other(3, weights=NAMES[0]))).verdict is Verdict.IDENTICAL
    later = ledger(at=4, **with_other(4, weights=NAMES[0]))
    assert compare(ledger("a", **even), later).first.step == 4


def test_frozen_parameters_have_no_gradient():
    frozen = replace(HEADER, parameters=tuple(replace(p, gradient=None) if "norm" in p.name else p for p in PARAMETERS))
    assert proved(compare(ledger("a", frozen), ledger("b", frozen))).endswith(
        "gradients of 9 parameters and weights of 14 parameters"
    )


# The table of parameters.


def grown(*starts: tuple[str, str, int]) -> Ledger:
    """A ledger in which digests (kind, parameter) are others from a step on."""
    records = []
    for step in range(1, STEPS + 1):
        good = record(step)
        changes = {kind: dict(getattr(good, kind)) for kind in ("gradients", "weights")}
        for kind, name, first in starts:
            if step >= first:
                changes[kind][name] = value("other", kind, name)
        records.append(replace(good, **changes))
    return Ledger(HEADER, tuple(records), Path("b/ledger.jsonl"), torn=False)


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


# The command.


def tpi(*arguments: object):
    app = typer.Typer()
    app.command()(compare_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], terminal_width=200)


def write(ledger: Ledger) -> None:
    """Into the directory that its path names."""
    ledger.path.parent.mkdir(exist_ok=True)
    with LedgerWriter(ledger.path).create(ledger.header) as writer:
        for step in ledger.steps:
            writer.append(step)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(A)
    return tmp_path


def test_a_table_shows_the_first_parameters_and_all_on_request(folder):
    order = in_order(NAMES)
    write(grown(*(("weights", name, 2 + n % 2) for n, name in enumerate(order[:-1]))))
    result = tpi("a", "b")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"different at step 2: weight of {order[0]} differs after the step, its gradient and")
    assert lines[0].endswith("; 4 of 5 steps differ")
    assert lines[1] == "13 of 14 parameters differ, the first at step 2"
    assert "and 1 more (--all)" in lines
    names = [line.split()[0] for line in lines if line.split() and line.split()[0] in NAMES]
    assert names == [*order[:-1:2], *order[1:-1:2]][:12]
    everything = tpi("a", "b", "--all").stdout
    assert all(name in everything for name in order[:-1])
    assert "--all" not in everything


def test_a_table_that_would_repeat_one_line_is_left_out(folder):
    write(grown(*(("weights", name, 2) for name in NAMES)))
    result = tpi("a", "b").stdout
    assert "all 14 parameters differ: weights from step 2\n" in result
    assert result.count(NAMES[3]) == 0
    assert tpi("a", "b", "--all").stdout.count(NAMES[3]) == 1


def test_json_has_everything(folder):
    write(ledger("b", traced=(3,), **with_other(3, gradients=NAMES[1], weights=NAMES[2])))
    write(ledger("c", header=replace(HEADER, parameters=(replace(PARAMETERS[0], shape=(1, 128)), *PARAMETERS[1:]))))
    different, model = json.loads(tpi("--json", "a", "b", "c").stdout)["comparisons"]
    assert different["first_difference"] == {
        "step": 3,
        "phase": "gradient",
        "kind": "gradients",
        "name": f"gradients/{NAMES[1]}",
        "a": record(3).gradients[NAMES[1]],
        "b": value("other", NAMES[1]),
        "ulp": None,
        "inputs_matched": None,
        "explanation": f"gradient of {NAMES[1]} differs, loss matched",
        "distance": None,
    }
    assert different["parameters"] == [
        {"name": NAMES[1], "kind": "gradients", "steps": [3]},
        {"name": NAMES[2], "kind": "weights", "steps": [3]},
    ]
    assert different["coverage"] == {
        "gradients": {"both": 5, "only_a": 0, "only_b": 0},
        "weights": {"both": 5, "only_a": 0, "only_b": 0},
        "trace": {"both": 0, "only_a": 0, "only_b": 1},
    }
    assert different["trace"] == {"compared": 0, "only_a": 0, "only_b": 0, "undigested": 0}
    assert model["model"] == [{"parameter": NAMES[0], "a": "shape [8, 16]", "b": "shape [1, 128]"}]


def dump(run: str, *values: float, shape: tuple[int, ...] = (2, 2), name: str = f"forward/{FC2}/output") -> Path:
    file = dumps.file_of(Path(run), 3, 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    bits = np.array(values, dtype=np.float32).view(np.uint32).reshape(shape)
    part = dumps.DumpedPart(name, "float32", shape, row=0, step=1, column=0)
    save_file({"0": bits}, file, {dumps.RANKS: "1", "0": part.text()})
    return file


@pytest.fixture
def traced_runs(folder):
    """Runs a and b, traced at step 3, where an output differs."""
    Path("a/ledger.jsonl").unlink()
    write(ledger("a", traced=(2, 3)))
    write(ledger("b", traced=(2, 3), **with_trace(3, f"forward/{FC2}/output")))


def said(*arguments: str) -> list[str]:
    """The lines below the verdict of `tpi compare a b`."""
    return tpi("a", "b", *arguments).stdout.splitlines()[1:]


def test_dumps_show_how_far_apart_the_values_are(traced_runs):
    dump("a", 1.0, 2.0, 3.0, 4.0)
    assert said() == ["To see how far apart the values are: tpi bisect a b"]
    dump("b", 1.0, 2.0, float(np.nextafter(np.float32(3.0), np.float32(4.0))), float("nan"))
    assert said() == [
        f"forward/{FC2}/output: 2 of 4 elements differ, by at most 1 ULP and 2.38e-07, 1 of them with a NaN, the first "
        "at [1, 0]."
    ]
    [comparison] = json.loads(tpi("a", "b", "--json").stdout)["comparisons"]
    distance = comparison["first_difference"]["distance"]
    assert (distance["total"], distance["differing"], distance["max_ulp"], distance["first"]) == (4, 2, 1, [1, 0])


def test_dumps_of_another_tensor_do_not_count(traced_runs):
    for run in ("a", "b"):
        dump(run, 1.0, 2.0, 3.0, 4.0, name=f"forward/{FC1}/output")
    assert said() == ["To see how far apart the values are: tpi bisect a b"]


def test_damaged_dumps_hide_no_difference(traced_runs):
    dump("a", 1.0, 2.0, 3.0, 4.0)
    file = dump("b", 1.0, 2.0, 3.0, 4.5)
    file.write_bytes(file.read_bytes()[:-3])
    result = tpi("a", "b")
    assert result.exit_code == 1
    assert f"the dumps do not show how far apart: {file} is not a whole dump" in result.stdout
    [comparison] = json.loads(tpi("a", "b", "--json").stdout)["comparisons"]
    assert str(file) in comparison["first_difference"]["distance"]["error"]


def test_dumps_of_other_shapes_are_said(traced_runs):
    dump("a", 1.0, 2.0, 3.0, 4.0)
    dump("b", 1.0, 2.0, 3.0, 4.0, shape=(4, 1))
    assert "no distance between float32 [2, 2] and float32 [4, 1]" in said()[0]


def test_a_ledger_on_its_own_cannot_be_bisected(folder):
    write(replace(ledger(**with_other(3, gradients=NAMES[1])), path=Path("b/other.jsonl")))
    assert "bisect" not in tpi("a", "b/other.jsonl").stdout


def test_a_torn_line_hides_no_difference_before_it(folder):
    write(ledger("b", **with_other(3, weights=NAMES[2])))
    with open("b/ledger.jsonl", "rb+") as stream:
        stream.truncate(stream.seek(0, 2) - 10)
    result = tpi("a", "b")
    assert result.exit_code == 1
    assert "; 1 of 4 steps differ; b ends at step 4\n" in result.stdout
    assert "b: the last line is torn" in result.stdout


def test_reordered_lines_are_refused(folder):
    write(ledger("b"))
    lines = Path("b/ledger.jsonl").read_bytes().splitlines(keepends=True)
    lines[2], lines[3] = lines[3], lines[2]
    Path("b/ledger.jsonl").write_bytes(b"".join(lines))
    result = tpi("a", "b")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "b/ledger.jsonl line 3: step 3 where step 2 belongs" in result.stderr
