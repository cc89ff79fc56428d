"""Reading ledgers to compare them: equal lines are decoded once, and whoever waits for long is told."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.compare.ledgers import HEADER, record
from tp_invariant_recipes.cli import progress
from tp_invariant_recipes.compare.compare import compare
from tp_invariant_recipes.compare.text import report
from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.ledger import reader
from tp_invariant_recipes.ledger.lines import encode_header, encode_step
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.ledger.reader import Decoded


def written(file: Path, *, header=HEADER, steps: int = 4, **changes) -> Path:
    """A ledger on disk; `changes` are those of step 3."""
    lines = (encode_step(record(step, **(changes if step == 3 else {})), header) for step in range(1, steps + 1))
    file.write_bytes(encode_header(header) + b"".join(lines))
    return file


def test_equal_lines_are_decoded_once_and_others_are_not_taken_for_them(tmp_path):
    decoded = Decoded()
    a, b = (
        read(written(tmp_path / name, **changes), decoded=decoded)
        for name, changes in (("a", {}), ("b", {"loss": "f32:40c80001"}))
    )
    assert [one is other for one, other in zip(a.steps, b.steps, strict=True)] == [True, True, False, True]
    assert b == read(tmp_path / "b")


@pytest.mark.parametrize(
    "changes", ({}, {"loss": "f32:40c80001"}, {"diverged": (("gradients", "output_layer.weight", ((0,), (1,))),)})
)
def test_the_comparison_is_that_of_ledgers_read_apart(tmp_path, changes):
    files = written(tmp_path / "a", **changes), written(tmp_path / "b", diverged=changes.get("diverged", ()))
    decoded = Decoded()
    together = compare(*(read(file, decoded=decoded) for file in files))
    apart = compare(*map(read, files))
    assert report([together]) == report([apart])
    assert together.exit_status == (1 if changes else 0)


def test_a_line_of_other_parameters_is_another_record(tmp_path):
    renamed = [replace(one, name=f"{one.name}_") for one in HEADER.parameters]
    other = replace(HEADER, parameters=tuple(renamed))
    lines = encode_header(other) + (written(tmp_path / "a").read_bytes().partition(b"\n")[2])
    (tmp_path / "b").write_bytes(lines)
    decoded = Decoded()
    read(tmp_path / "a", decoded=decoded)
    with pytest.raises(LedgerError, match=r"b line 2: gradients: group or model do not belong to the parameters"):
        read(tmp_path / "b", decoded=decoded)


def test_a_line_that_stands_twice_is_still_out_of_order(tmp_path):
    lines = written(tmp_path / "a").read_bytes().splitlines(keepends=True)
    (tmp_path / "b").write_bytes(b"".join([*lines[:3], lines[2], *lines[3:]]))
    decoded = Decoded()
    read(tmp_path / "a", decoded=decoded)
    with pytest.raises(LedgerError, match=r"b line 4: step 2 where step 3 belongs"):
        read(tmp_path / "b", decoded=decoded)


def test_who_waits_for_long_is_told_how_far_it_is(cli, monkeypatch, tmp_path):
    files = written(tmp_path / "a", steps=5), written(tmp_path / "b", steps=5)
    quick = cli("compare", *files)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(reader, "PROGRESS_EVERY", 2)
    slow = cli("compare", *files)
    assert (quick.status, quick.err) == (0, "")
    assert (slow.status, slow.out) == (0, quick.out)
    assert slow.err.startswith(f"reading {files[0]}: ")
    assert len(slow.err.splitlines()) == 1  # the next word comes after ten seconds
