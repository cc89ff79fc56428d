# SPDX-License-Identifier: Apache-2.0
"""The ledger file: what is written is read back, damage is refused by line, and a resumed run leaves no trace."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ledgers import record
from tp_invariant_recipes.comparison.compare import Verdict, compare
from tp_invariant_recipes.errors import LedgerError, RunError
from tp_invariant_recipes.ledger.lines import encode_header, encode_step
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.ledger.record import Header, LedgerWriter, StepRecord, resume
from tp_invariant_recipes.ledger.stream import parse

FILE = Path("run/ledger.jsonl")
HEADER = Header(
    identity={"model.num_layers": 36, "rng.seed": 1234, "data.digest": "ab12", "data.split": (9, 1)},
    numerics={"mode": "tree", "V": 8},
    layout={"tp": 2, "pp": 1},
    versions={"torch": "2.11.0"},
    device={"names": ["cpu"], "capability": None},
    environment={"NCCL_ALGO": "Ring"},
    notes={"tokenizer": "eod counted in"},
)
F32_TEXTS = st.integers(0, 2**32 - 1).map("f32:{:08x}".format)
F64_TEXTS = st.integers(0, 2**64 - 1).map("f64:{:016x}".format)
TEXTS = F32_TEXTS | F64_TEXTS


def numbered_step(step: int, **changes) -> StepRecord:
    """A plausible step; the loss of every step is another."""
    return record(step, **{"loss": f"f32:{0x40C80000 + step:08x}", **changes})


def ledger_lines(steps: int = 5, header: Header = HEADER) -> list[bytes]:
    return [encode_header(header), *(encode_step(numbered_step(step), HEADER) for step in range(1, steps + 1))]


def write_steps(path: Path, steps: int) -> bytes:
    with LedgerWriter(path).create(HEADER) as writer:
        for step in range(1, steps + 1):
            writer.append(numbered_step(step))
    return path.read_bytes()


ZERO = encode_step(numbered_step(1, loss="f32:00000000"), HEADER)


@st.composite
def records(draw) -> list[StepRecord]:
    result = []
    for step in range(1, draw(st.integers(0, 2)) + 1):
        skipped = draw(st.booleans())
        maybe = st.none() | TEXTS if skipped else TEXTS
        counts = dict(samples=draw(st.integers(0, 2**70)), tokens=draw(st.integers(0, 2**40)))
        floats = dict(loss=draw(maybe), grad_norm=draw(maybe), learning_rate=draw(TEXTS))
        names = st.sampled_from(("validation/0:8", "final_validation/8:16", "test/0:8"))
        floats["evaluations"] = draw(st.dictionaries(names, TEXTS))
        result.append(StepRecord(step=step, skipped=skipped, **counts, **floats))
    return result


@given(records())
def test_what_is_written_is_read_back(steps):
    ledger = parse(FILE, b"".join([encode_header(HEADER), *(encode_step(s, HEADER) for s in steps)]))
    assert (ledger.header, list(ledger.steps), ledger.torn) == (HEADER, steps, False)


def test_a_line_shows_bits_beside_a_number():
    line = json.loads(encode_step(numbered_step(1, loss="f32:40c80000", grad_norm=None, skipped=True), HEADER))
    assert list(line) == ["step", "samples", "tokens", "loss", "grad_norm", "learning_rate", "skipped"]
    assert line["loss"] == {"bits": "f32:40c80000", "value": 6.25}
    assert line["grad_norm"] is None
    assert json.loads(encode_step(numbered_step(1, loss="f32:7fc00001"), HEADER))["loss"]["value"] == "nan"


def test_header_text_does_not_depend_on_the_order_of_keys():
    reordered = replace(HEADER, identity=dict(reversed(HEADER.identity.items())))
    assert encode_header(reordered) == encode_header(HEADER)


@pytest.mark.parametrize(
    "changes",
    (
        {"step": 0}, {"step": True}, {"step": 1.0}, {"samples": -1}, {"tokens": None}, {"loss": None},
        {"grad_norm": None}, {"learning_rate": None, "skipped": True}, {"loss": 6.25}, {"loss": "f32:40C80000"},
        {"skipped": 0}, {"evaluations": {"validation": "f32:40c80000"}},
        {"evaluations": {"validating/0:8": "f32:40c80000"}}, {"evaluations": {"validation/0:8": 6.25}},
        {"evaluations": {"validation/00:8": "f32:40c80000"}},
    ),
    ids=str,
)  # fmt: skip
def test_a_record_refuses_what_is_not_exact(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(numbered_step(1), **changes)


@pytest.mark.parametrize("identity", ({}, {"model": {"layers": 1}}, {"a": float("nan")}, [], None), ids=str)
def test_an_identity_is_flat_json_and_not_empty(identity):
    with pytest.raises(ValueError):
        Header(identity=identity)


@pytest.mark.parametrize(
    "damage, line, words",
    (
        (lambda x: [x[0], x[1], x[3]], 3, "step 3 where step 2 belongs"),
        (lambda x: [x[0], x[2]], 2, "step 2 where step 1 belongs"),
        (lambda x: [x[0], x[1], x[1], x[2]], 3, "step 1 where step 2 belongs"),
        (lambda x: [x[0], x[2], x[1]], 2, "out of order"),
        (lambda x: [*x, x[5]], 7, "step 5 where step 6 belongs"),
        (lambda x: [x[0], x[1][:40] + b"\n", x[2]], 2, ""),
        (lambda x: [x[0], x[1][:40], x[2], x[3]], 2, ""),
        (lambda x: [x[0], b"\n", x[1]], 2, ""),
        (lambda x: [x[0], x[1], x[2][:40] + b"\n", x[3][:40]], 3, ""),
        (lambda x: [x[1], x[0]], 1, "not a ledger"),
        (lambda x: x[1:], 1, "not a ledger"),
        (lambda x: [x[0], *x], 2, "step"),
        (lambda x: [x[0], x[1].replace(b'"tokens"', b'"token"'), x[2]], 2, "tokens is missing"),
        (lambda x: [x[0], x[1].replace(b"6.25", b"6.26"), x[2]], 2, "does not belong to bits"),
        (lambda x: [x[0], ZERO.replace(b": 0.0}", b": -0.0}"), x[2]], 2, "does not belong to bits"),
        (lambda x: [x[0], x[1].replace(b'"step": 1,', b'"step": 1, "step": 1,'), x[2]], 2, "twice"),
        (lambda x: [x[0], b"[" * 100_000 + b"\n", x[2]], 2, ""),
        (lambda x: [x[0].replace(b'"schema": 3', b'"schema": 4'), x[1]], 1, "schema 4"),
        (lambda x: [x[0].replace(b"1234", b"1235"), x[1]], 1, "identity_hash"),
        (lambda x: [x[0].replace(b'"layout"', b'"layouts"'), x[1]], 1, "layout is missing"),
        (lambda x: [b'{"some": "json"}\n'], 1, "not a ledger"),
        (lambda x: [b"\x7fELF\x02\x01\n\xff"], 1, "not a ledger"),
        (lambda x: [x[0][:-1]], 1, "not a ledger"),
        (lambda x: [], 1, "empty"),
    ),
)
def test_damage_is_refused_and_named_by_line(damage, line, words):
    with pytest.raises(LedgerError) as caught:
        parse(FILE, b"".join(damage(ledger_lines())))
    assert str(caught.value).startswith(f"run/ledger.jsonl line {line}: ")
    assert words in str(caught.value)


@given(st.integers(0, len(b"".join(ledger_lines()))))
def test_every_prefix_is_an_error_or_a_valid_prefix(size):
    """A run may be killed after any byte."""
    whole = ledger_lines()
    data = b"".join(whole)[:size]
    if size < len(whole[0]):
        with pytest.raises(LedgerError, match="line 1"):
            parse(FILE, data)
        return
    ledger = parse(FILE, data)
    complete = data.count(b"\n") - 1
    assert ledger.steps == tuple(numbered_step(step) for step in range(1, complete + 1))
    assert ledger.torn == (not data.endswith(b"\n"))


@pytest.mark.parametrize("tail", (b'{"step": 6, "samp\n', b"\x00\x00\x00\n", b"\xff\xfe", b"{", b"\n"))
def test_a_torn_last_line_is_reported(tail):
    ledger = parse(FILE, b"".join(ledger_lines()) + tail)
    assert ledger.torn
    assert len(ledger.steps) == 5


# Every 37th bit is one of each eight in turn; every bit takes 4 s.
@pytest.mark.parametrize("stride", (37, pytest.param(1, marks=pytest.mark.release)))
def test_a_flipped_bit_anywhere_in_the_file_is_noticed(stride):
    """Refused, or reported as a difference; unless JSON itself gives the flip no meaning, as e and E in a number."""
    written = b"".join(ledger_lines(3))
    meaning = [json.loads(line) for line in ledger_lines(3)]
    whole = parse(FILE, written)
    unnoticed = []
    for position in range(0, 8 * len(written), stride):
        data = bytearray(written)
        data[position // 8] ^= 1 << position % 8
        try:
            flipped = parse(FILE, bytes(data))
        except LedgerError:
            continue
        comparison = compare(whole, flipped)
        noticed = comparison.verdict is not Verdict.IDENTICAL or comparison.informed
        if not noticed and not flipped.torn and comparison.tally.compared == 3:
            unnoticed += [position] if [json.loads(line) for line in data.splitlines()] != meaning else []
    assert unnoticed == []


@pytest.mark.parametrize("make", (lambda path: None, lambda path: path.mkdir(), lambda path: path.touch()))
def test_a_missing_or_empty_ledger_is_named(tmp_path, make):
    make(tmp_path / "run")
    with pytest.raises(LedgerError, match=str(tmp_path / "run")):
        read(tmp_path / "run")


def test_create_refuses_an_existing_file(tmp_path):
    before = write_steps(tmp_path / "ledger.jsonl", 2)
    with pytest.raises(LedgerError, match="exists already"):
        LedgerWriter(tmp_path).create(HEADER)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize("step", (1, 2, 4))
def test_append_refuses_a_step_out_of_order(tmp_path, step):
    writer = LedgerWriter(tmp_path).create(HEADER)
    writer.append(numbered_step(1))
    writer.append(numbered_step(2))
    with pytest.raises(ValueError, match=f"step {step} cannot follow step 2"):
        writer.append(numbered_step(step))
    writer.append(numbered_step(3))
    assert len(read(tmp_path).steps) == 3


def _deleted(file: Path) -> None:
    file.unlink()


def _replaced(file: Path) -> None:
    _deleted(file)
    file.write_bytes(b"")


def _folder_moved(file: Path) -> None:
    file.parent.rename(file.parent.with_name("elsewhere"))


@pytest.mark.parametrize("change", (_deleted, _replaced, _folder_moved))
def test_a_ledger_that_goes_while_it_is_written_is_noticed_at_the_next_line(tmp_path, change):
    (tmp_path / "run").mkdir()
    writer = LedgerWriter(tmp_path / "run").create(HEADER)
    change(writer.path)
    with pytest.raises(RunError, match=r"ledger.jsonl was deleted, moved or replaced while this run writes it"):
        writer.append(numbered_step(1))


def test_half_a_line_ends_the_writing(tmp_path, monkeypatch):
    real = os.write
    writer = LedgerWriter(tmp_path).create(HEADER)
    writer.append(numbered_step(1))
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:20]))
    with pytest.raises(RunError, match="only part"):
        writer.append(numbered_step(2))
    monkeypatch.undo()
    with pytest.raises(RunError, match="not open"):
        writer.append(numbered_step(2))
    assert read(tmp_path).torn
    assert len(read(tmp_path).steps) == 1


DURING, AFTER = (
    {"validation/0:8": "f32:40c80000"},
    {"final_validation/8:16": "f32:40c80001", "test/0:8": "f32:80000000"},
)


def test_an_evaluation_is_added_to_the_last_line(tmp_path):
    write_steps(tmp_path / "other.jsonl", 2)
    with LedgerWriter(tmp_path).create(HEADER) as writer:
        writer.append(numbered_step(1, evaluations=DURING))
        writer.append(numbered_step(2))
        writer.add(DURING)
        writer.add(AFTER)
        writer.append(numbered_step(3))
    first, second, three = read(tmp_path).steps
    assert (first.evaluations, second.evaluations, three.evaluations) == (DURING, DURING | AFTER, {})


def test_a_line_that_cannot_be_lengthened_stays_whole(tmp_path, monkeypatch):
    real = os.write
    writer = LedgerWriter(tmp_path).create(HEADER)
    writer.append(numbered_step(1))
    before = (tmp_path / "ledger.jsonl").read_bytes()
    for size in (0, 20, len(encode_step(numbered_step(1), HEADER)) - 2):
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", lambda descriptor, data, size=size: real(descriptor, data[:size]))
            with pytest.raises(RunError, match="only part"):
                writer.add(DURING)
        assert (tmp_path / "ledger.jsonl").read_bytes() == before
        writer._open()
    (tmp_path / "ledger.jsonl").write_bytes(before.replace(b'"tokens": 64', b'"tokens": 65'))
    with pytest.raises(RunError, match="not the one that this run has written"):
        writer.add(DURING)


def test_a_run_that_goes_on_drops_what_followed_its_training(tmp_path):
    with LedgerWriter(tmp_path).create(HEADER) as writer:
        writer.append(numbered_step(1))
        writer.append(numbered_step(2, evaluations=DURING | AFTER))
    with resume(tmp_path, HEADER, 2) as writer:
        writer.append(numbered_step(3))
    assert [step.evaluations for step in read(tmp_path).steps] == [{}, DURING, {}]
    assert read(tmp_path / "ledger.replaced-1.jsonl").steps[1].evaluations == DURING | AFTER


@pytest.mark.parametrize("tail", (b"", b'{"step": 6', b'{"step": 6\n'), ids=("whole", "torn", "torn-newline"))
@pytest.mark.parametrize("step", range(6))
def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path, step, tail):
    file = tmp_path / "ledger.jsonl"
    uninterrupted = write_steps(tmp_path / "other.jsonl", 8)
    interrupted = write_steps(file, 5) + tail
    file.write_bytes(interrupted)
    with resume(tmp_path, HEADER, step) as writer:
        for next_step in range(step + 1, 9):
            writer.append(numbered_step(next_step))
    assert file.read_bytes() == uninterrupted
    kept = tmp_path / "ledger.replaced-1.jsonl"
    assert kept.exists() == (interrupted != b"".join(ledger_lines(step)))
    assert not kept.exists() or kept.read_bytes() == interrupted
    assert {path.name for path in tmp_path.iterdir()} <= {"ledger.jsonl", "other.jsonl", kept.name}


def test_every_replaced_file_is_kept(tmp_path):
    file = tmp_path / "ledger.jsonl"
    first = write_steps(file, 5)
    with resume(file, HEADER, 3) as writer:
        writer.append(numbered_step(4))
    second = file.read_bytes()
    resume(file, HEADER, 2).close()
    assert (tmp_path / "ledger.replaced-1.jsonl").read_bytes() == first
    assert (tmp_path / "ledger.replaced-2.jsonl").read_bytes() == second
    assert len(read(tmp_path).steps) == 2
    assert len(read(tmp_path / "ledger.replaced-1.jsonl").steps) == 5


def test_the_old_file_survives_a_disk_that_fills_up_on_resume(tmp_path, monkeypatch):
    before = write_steps(tmp_path / "ledger.jsonl", 5)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(RunError, match="No space"):
        resume(tmp_path, HEADER, 3)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


def test_resume_refuses_another_identity_and_names_it(tmp_path):
    before = write_steps(tmp_path / "ledger.jsonl", 5)
    identity = {**HEADER.identity, "rng.seed": 1235, "model.new": True}
    del identity["data.digest"]
    with pytest.raises(LedgerError) as caught:
        resume(tmp_path, replace(HEADER, identity=identity), 3)
    for words in ("rng.seed is 1234 there and 1235 now", "model.new is not set there", 'data.digest is "ab12" there'):
        assert words in str(caught.value)
    assert "num_layers" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.jsonl"]
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize("step", (-1, 6))
def test_resume_refuses_a_step_the_ledger_does_not_have(tmp_path, step):
    write_steps(tmp_path / "ledger.jsonl", 5)
    with pytest.raises(LedgerError, match=f"ends at step 5 and cannot go on after step {step}"):
        resume(tmp_path, HEADER, step)


def test_resume_on_another_layout_is_noted(tmp_path):
    write_steps(tmp_path / "ledger.jsonl", 5)
    wider = replace(HEADER, layout={"tp": 4})
    with resume(tmp_path, wider, 5) as writer:
        writer.append(numbered_step(6))
    note = {"after_step": 5, "changed": {"layout.pp": None, "layout.tp": 4}}
    assert read(tmp_path).header == replace(HEADER, notes=HEADER.notes | {"resumed": [note]})
    resume(tmp_path, wider, 6).close()
    assert read(tmp_path).header.notes["resumed"] == [note]
    resume(tmp_path, HEADER, 6).close()
    assert read(tmp_path).header.notes["resumed"] == [note, {"after_step": 6, "changed": {}}]
    resume(tmp_path, HEADER, 4).close()
    assert read(tmp_path).header == HEADER
    resume(tmp_path, wider, 0).close()
    assert read(tmp_path).header == wider
