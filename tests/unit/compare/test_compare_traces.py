"""Comparing traces and initial weights: where a difference arises, and what matched before it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.compare.ledgers import FC1, FC2, HEADER, NAMES, NO_STATE, ledger, record, trace, value, with_trace
from tp_invariant_recipes.compare.compare import TraceCoverage, Verdict, compare
from tp_invariant_recipes.compare.comparison_json import comparison_json
from tp_invariant_recipes.compare.text import remarks, verdict_line

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
    assert {result.name for result in result.initial} == names
    more = f", and of {len(names) - 1} more parameters" if len(names) > 1 else ""
    assert verdict_line(result) == f"different: initial weight of {first} differs{more}; 1 of 5 steps differ"
    assert comparison_json(result)["initial"] == [name for name in NAMES if name in names]


def test_initial_weights_that_one_run_lacks_are_not_comparable():
    for result in (compare(ledger("a", STARTED), ledger("b")), compare(ledger("b"), ledger("a", STARTED))):
        assert verdict_line(result) == "not comparable: only a has digests of the initial weights"
    without = ledger("b", replace(HEADER, parameters=()), digested=lambda step: False)  # ledger.digests=0
    assert compare(ledger("a", STARTED), without).verdict is Verdict.IDENTICAL


def test_weights_that_are_not_recorded_are_reported():
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
    assert "Not compared: 1 traced tensor without a digest that two layouts share." in remarks(result)


def test_another_dtype_or_shape_is_reported():
    changed = tuple(
        replace(e, dtype="float32", shape=(8, 2, 8), digest="0" * 32)
        if (e.direction, e.module, e.tensor) == ("forward", FC2, "output")
        else e
        for e in trace(3)
    )
    result = compare(ledger("a", **TRACED), ledger(**TRACED, trace=changed))
    assert ": output differs (bfloat16 [4, 2, 8] and float32 [8, 2, 8]), its inputs and" in result.first.explanation


@pytest.mark.parametrize("has", (True, False))
def test_a_trace_that_lacks_or_renames_an_entry_is_not_comparable(has):
    name = f"backward/{FC2}/output"
    fewer = tuple(entry for entry in trace(3) if entry.name != name)
    pair = [ledger("a", traced=(3,)), ledger(traced=(3,), trace=fewer)]
    result = compare(*(pair if has else pair[::-1]))
    assert result.verdict is Verdict.NOT_COMPARABLE
    assert verdict_line(result) == f"not comparable: only a has {name}, at step 3"
    renamed = tuple(replace(e, module="x") if e.name == name else e for e in trace(3))
    pair[1] = ledger(traced=(3,), trace=renamed)
    result = compare(*(pair if has else pair[::-1]))
    assert {(item.name, item.step) for item in result.unmatched} == {(name, 3), ("backward/x/output", 3)}
    other = compare(pair[0], ledger(traced=(3,), trace=fewer, loss="f32:40c80001"))
    assert other.verdict is Verdict.DIFFERENT
    assert f"Not compared: only a has {name}, at step 3." in remarks(other)


def test_a_digest_that_only_one_run_of_a_layout_has_is_not_comparable():
    name = f"forward/{FC2}/output"
    lacks = with_trace(3, name, digest=None)
    result = compare(ledger("a", **TRACED), ledger(**TRACED, **lacks))
    assert verdict_line(result) == f"not comparable: only a has {name}, at step 3"
    for layout in ({"layout": {"tp": 2}}, {"notes": {"resumed": [{"after_step": 1, "changed": {"layout.tp": 2}}]}}):
        other = compare(ledger("a", **TRACED), ledger("b", replace(HEADER, **layout), **TRACED, **lacks))
        assert (other.verdict, other.trace.undigested) == (Verdict.IDENTICAL, 1)


@pytest.mark.parametrize("change", ({"dtype": "float32"}, {"shape": (8, 1, 8)}))
def test_an_entry_of_another_dtype_or_shape_differs_whatever_its_digest(change):
    name = f"forward/{FC2}/output"
    entries = tuple(replace(e, **change) if e.name == name else e for e in trace(3))
    result = compare(ledger("a", **TRACED), ledger(**TRACED, trace=entries))
    assert (result.verdict, result.first.name) == (Verdict.DIFFERENT, name)


def test_of_other_modules_the_common_ones_are_compared_and_the_others_counted():
    fewer = tuple(entry for entry in trace(3) if entry.module != FC2)
    gpu = replace(HEADER, device={"name": "GPU"})
    result = compare(ledger("a", traced=(3,)), ledger("b", gpu, traced=(3,), trace=fewer))
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
    assert result.first.name == f"backward/{FC2} #2/output"
    assert "its inputs and weights matched" in result.first.explanation


def test_no_module_hides_the_second_call_of_another():
    """x has a second call, and a module is named x#2: all three are compared."""
    named = [replace(e, module=f"{FC2}#2") for e in trace(3) if e.module == FC2]
    both = (*trace(3), *(e for e in trace(3) if e.module == FC2), *named)
    place = len(trace(3))
    other = (*both[:place], replace(both[place], digest="0" * 32), *both[place + 1 :])
    result = compare(ledger("a", traced=(3,), trace=both), ledger(traced=(3,), trace=other))
    assert result.verdict is Verdict.DIFFERENT


def test_a_tensor_has_no_name_that_could_be_a_modules():
    with pytest.raises(ValueError, match="'b/output' is not a tensor of a module"):
        record(3, trace=(replace(trace(3)[0], module="a", tensor="b/output"),))


def test_a_trace_of_one_run_alone():
    result = compare(ledger("a", traced=(2, 3)), ledger())
    assert result.verdict is Verdict.IDENTICAL
    assert remarks(result) == (
        NO_STATE,
        "Traces are compared at 0 of 5 steps; a alone has them at 2.",
    )
    assert "trace" not in verdict_line(result)
