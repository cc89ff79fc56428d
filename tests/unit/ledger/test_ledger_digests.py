# SPDX-License-Identifier: Apache-2.0
"""Digests, traces and disagreeing replicas in a ledger's lines: read back as written, and any altered digit refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.ledger.digests import Parameter, Traced
from tp_invariant_recipes.ledger.lines import encode_header, encode_step
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.ledger.record import Header, LedgerWriter, StepRecord, resume
from tp_invariant_recipes.ledger.stream import parse

FILE = Path("run/ledger.jsonl")
NAMES = ("embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.bias")
# The last has no gradient: a saved buffer.
PARAMETERS = tuple(Parameter(name, (4, 2), "float32" if n < 2 else None, "bfloat16") for n, name in enumerate(NAMES))
DIGESTS = st.integers(0, 2**128 - 1).map("{:032x}".format)
INITIAL = {name: f"{n}" * 32 for n, name in enumerate(NAMES)}
HEADER = Header(identity={"rng.seed": 1}, parameters=PARAMETERS, initial=INITIAL)
TRACED = Traced("forward", "decoder.layers.0.mlp", "output", "bfloat16", (4, 1, 8), "a" * 32)
RECORD = StepRecord(
    step=1,
    samples=1,
    tokens=4,
    loss="f32:40c80000",
    grad_norm="f32:3fa00000",
    learning_rate="f64:3f33a92a30553261",
    gradients={name: "b" * 32 for name in NAMES[:2]},
    weights={name: "c" * 32 for name in NAMES},
    diverged=(("weights", NAMES[0], ((0, 2), (1,))), ("forward", "decoder.layers.0.mlp/output", ((0,), (1,)))),
    trace=(TRACED, replace(TRACED, direction="backward", digest=None, shape=())),
)


def read_back_ledger(header: Header, *records: StepRecord):
    return parse(FILE, b"".join([encode_header(header), *(encode_step(record, header) for record in records)]))


@given(
    gradients=st.none() | st.fixed_dictionaries(dict.fromkeys(NAMES[:2], DIGESTS)),
    clipped=st.none() | st.fixed_dictionaries(dict.fromkeys(NAMES[:2], DIGESTS)),
    weights=st.none() | st.fixed_dictionaries(dict.fromkeys(NAMES, DIGESTS)),
    initial=st.none() | st.fixed_dictionaries(dict.fromkeys(NAMES, DIGESTS)),
    traced=st.booleans(),
    diverged=st.booleans(),
)
def test_what_is_written_is_read_back(gradients, clipped, weights, initial, traced, diverged):
    record = replace(RECORD, gradients=gradients, clipped=clipped, weights=weights)
    record = replace(record, trace=RECORD.trace if traced else None, diverged=RECORD.diverged if diverged else ())
    header = replace(HEADER, initial=initial)
    ledger = read_back_ledger(header, record)
    assert (ledger.header, ledger.steps) == (header, (record,))


def test_a_line_has_one_digest_for_the_model_and_one_for_each_group():
    line = json.loads(encode_step(RECORD, HEADER))
    assert list(line["weights"]["groups"]) == ["embedding.word_embeddings", "decoder.layers.0"]
    assert line["weights"]["parameters"] == ["c" * 32] * 3
    assert line["gradients"]["parameters"] == ["b" * 32] * 2
    assert line["diverged"][0] == {"of": "weights", "parameter": NAMES[0], "ranks": [[0, 2], [1]]}
    assert line["trace"][0] == ["forward", "decoder.layers.0.mlp", "output", "bfloat16", [4, 1, 8], "a" * 32]


def digests_in(line: bytes) -> list[str]:
    """All digests of a line, in whatever place."""
    results = []

    def visit(value):
        if isinstance(value, dict | list):
            for inner in value.values() if isinstance(value, dict) else value:
                visit(inner)
        elif isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value):
            results.append(value)

    visit(json.loads(line))
    return results


@given(st.data())
def test_an_altered_digit_of_any_digest_of_a_parameter_group_or_model_is_refused(data):
    """Those of a trace stand alone; a certificate protects them."""
    record = replace(RECORD, trace=None)
    lines = [encode_header(HEADER), encode_step(record, HEADER)]
    number = data.draw(st.integers(0, 1))
    text = data.draw(st.sampled_from(sorted(set(digests_in(lines[number])))))
    at = data.draw(st.integers(0, 31))
    digit = data.draw(st.sampled_from("0123456789abcdef").filter(lambda d: d != text[at]))
    altered = text[:at] + digit + text[at + 1 :]
    lines[number] = lines[number].replace(text.encode(), altered.encode(), 1)
    with pytest.raises(LedgerError, match=f"line {number + 1}: .*altered"):
        parse(FILE, b"".join(lines))


@pytest.mark.parametrize(
    "change, words",
    (
        (lambda raw: raw["weights"]["parameters"].pop(), "weights: 2 digests of 3 parameters"),
        (lambda raw: raw["weights"].pop("model"), "altered"),
        (lambda raw: raw["weights"]["parameters"].__setitem__(0, "C" * 32), "is not a digest"),
        (lambda raw: raw.update(gradients=[]), "gradients is not a dict"),
        (lambda raw: raw["trace"][0].pop(), "trace.0.5 is missing"),
        (lambda raw: raw["trace"][0].__setitem__(0, "sideways"), "trace.0.0: String should match pattern"),
        (lambda raw: raw["trace"][0].__setitem__(2, "b/output"), "trace.0.2: String should match pattern"),
        (lambda raw: raw["trace"][0].__setitem__(4, [1.5]), "trace.0.4.0: Input should be a valid integer"),
        (lambda raw: raw["diverged"][0].update({"of": "losses"}), "diverged.0.of: String should match pattern"),
    ),
)
def test_damage_is_named(change, words):
    raw = json.loads(encode_step(RECORD, HEADER))
    change(raw)
    with pytest.raises(LedgerError) as caught:
        parse(FILE, encode_header(HEADER) + json.dumps(raw).encode() + b"\n")
    assert str(caught.value).startswith("run/ledger.jsonl line 2: ")
    assert words in str(caught.value)


def test_digests_of_other_parameters_are_not_written():
    with pytest.raises(ValueError, match="other parameters"):
        encode_step(replace(RECORD, weights={NAMES[0]: "c" * 32}), HEADER)
    with pytest.raises(ValueError, match="twice"):
        replace(HEADER, parameters=(*PARAMETERS, PARAMETERS[0]))


def test_a_run_goes_on_only_with_the_parameters_that_it_began_with(tmp_path):
    with LedgerWriter(tmp_path).create(HEADER) as writer:
        writer.append(RECORD)
        writer.append(replace(RECORD, step=2))
    with pytest.raises(LedgerError, match=r"ledger\.digests"):
        resume(tmp_path, replace(HEADER, parameters=(), initial=None), 1)
    # Initial weights are those of the first start.
    resume(tmp_path, replace(HEADER, initial=None), 1).close()
    assert read(tmp_path).header == HEADER
    assert len(read(tmp_path).steps) == 1


@pytest.mark.parametrize("states, taken", ((16, True), (17, False)))
def test_an_optimizer_has_at_most_sixteen_tensors_of_a_parameter(states, taken):
    record = replace(RECORD, moments={f"state{n}/{name}": "d" * 32 for n in range(states) for name in NAMES[:2]})
    if taken:
        assert read_back_ledger(HEADER, record).steps == (record,)
    else:
        with pytest.raises(LedgerError, match="moments: 17 tensors of a parameter"):
            read_back_ledger(HEADER, record)
