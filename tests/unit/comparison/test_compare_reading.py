# SPDX-License-Identifier: Apache-2.0
"""Reading ledgers to compare them: in one pass that keeps no step, and whoever waits for long is told."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.comparison.ledgers import HEADER, record
from tp_invariant_recipes.comparison import compare as compare_module
from tp_invariant_recipes.comparison.compare import compare
from tp_invariant_recipes.comparison.result import comparison_json
from tp_invariant_recipes.comparison.text import remarks
from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.ledger.lines import encode_header, encode_step
from tp_invariant_recipes.ledger.open import read, streamed
from tp_invariant_recipes.ledger.stream import abreast
from tp_invariant_recipes.machine import progress


def written(file: Path, *, header=HEADER, steps: int = 4, **changes) -> Path:
    """A ledger on disk; `changes` are those of step 3."""
    lines = (encode_step(record(step, **(changes if step == 3 else {})), header) for step in range(1, steps + 1))
    file.write_bytes(encode_header(header) + b"".join(lines))
    return file


def test_equal_lines_are_one_record_and_others_are_not_taken_for_them(tmp_path):
    a, b = (
        streamed(written(tmp_path / name, **changes)) for name, changes in (("a", {}), ("b", {"loss": "f32:40c80001"}))
    )
    assert [first is other for first, other in abreast([a, b])] == [True, True, False, True]
    assert tuple(b.steps) == read(tmp_path / "b").steps
    assert (b.steps[-1], b.steps[1:3], len(b.steps)) == (b.steps[3], read(tmp_path / "b").steps[1:3], 4)


def test_the_end_of_the_longer_ledger_is_read_too(tmp_path):
    a, b = written(tmp_path / "a", steps=2), written(tmp_path / "b", diverged=(("gradients", "x", ((0,), (1,))),))
    comparison = compare(streamed(a), streamed(b))
    assert (comparison.tally.compared, comparison.tally.later) == (2, [None, 3])
    assert comparison_json(comparison) == comparison_json(compare(read(a), read(b)))
    b.write_bytes(b.read_bytes().replace(b'"step": 4', b'"step": 5'))
    with pytest.raises(LedgerError, match=r"b line 5: step 5 where step 4 belongs"):
        compare(streamed(a), streamed(b))


def test_a_line_of_other_parameters_is_another_record(tmp_path):
    renamed = [replace(parameter, name=f"{parameter.name}_") for parameter in HEADER.parameters]
    other = replace(HEADER, parameters=tuple(renamed))
    lines = encode_header(other) + (written(tmp_path / "a").read_bytes().partition(b"\n")[2])
    (tmp_path / "b").write_bytes(lines)
    with pytest.raises(LedgerError, match=r"b line 2: gradients: group or model do not belong to the parameters"):
        compare(streamed(tmp_path / "a"), streamed(tmp_path / "b"))


def test_a_file_that_another_takes_the_place_of_or_that_is_cut_is_named(tmp_path):
    file = written(tmp_path / "a")
    cut, replaced = streamed(file), streamed(file)
    os.truncate(file, file.stat().st_size - 10)
    with pytest.raises(LedgerError, match=r"a was replaced or truncated while it was read: repeat the command"):
        tuple(cut.steps)
    written(tmp_path / "other").replace(file)
    with pytest.raises(LedgerError, match=r"a was replaced or truncated while it was read: repeat the command"):
        replaced.steps[0]


def test_who_waits_for_long_is_told_how_far_it_is(cli, monkeypatch, tmp_path):
    files = written(tmp_path / "a", steps=5), written(tmp_path / "b", steps=5)
    monkeypatch.setattr(progress, "PATIENCE", 1e9)
    quick = cli("compare", *files)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(compare_module, "PROGRESS_EVERY", 2)
    slow = cli("compare", *files)
    assert (quick.status, quick.err) == (0, "")
    assert (slow.status, slow.out) == (0, quick.out)
    assert slow.err.startswith(f"reading {files[0]}: 100% of 0 MiB")
    assert len(slow.err.splitlines()) == 1  # the next word comes after ten seconds
    monkeypatch.setattr(progress, "EVERY", 0.0)
    assert cli("compare", *files).err.splitlines()[1:] == [
        f"reading {files[1]}: 100% of 0 MiB",
        "comparing: step 2 of 5",
        "comparing: step 4 of 5",
    ]


def test_a_hard_link_is_the_same_file(tmp_path):
    single, link, copy = (tmp_path / name for name in ("one.jsonl", "link.jsonl", "copy.jsonl"))
    written(single)
    link.hardlink_to(single)
    copy.write_bytes(single.read_bytes())
    messages = [remarks(compare(read(single), read(other)))[0] for other in (link, copy)]
    assert [sentence.startswith("Both are the same file") for sentence in messages] == [True, False]
