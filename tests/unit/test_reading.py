# SPDX-License-Identifier: Apache-2.0
"""A format is one dataclass: what `checked` makes of a mapping, and what it says of one of another kind."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from tp_invariant_recipes import reading
from tp_invariant_recipes.reading import (
    DEPTH,
    Count,
    Keys,
    Listed,
    Record,
    checked,
    open_file,
    parse_json,
    parse_yaml,
    read_limited,
    read_lines,
)


@dataclass(frozen=True)
class Named(Record):
    mode: str = ""


@dataclass(frozen=True)
class Whole(Record):
    pass_: Count
    rows: Listed[Named]
    part: Annotated[dict[str, Any], Keys(Named)]
    seconds: float | None = None


VALUE = {"pass": 1, "rows": [{"mode": "tree", "other": 2}], "part": {"mode": "tree", "other": 2}, "unknown": 3}


def test_a_mapping_becomes_a_record_and_unknown_keys_are_ignored():
    result = checked(Whole, VALUE)
    assert result == Whole(1, (Named("tree"),), {"mode": "tree", "other": 2})
    assert checked(Whole, result.as_json()) == result
    assert list(result.as_json()) == ["pass", "rows", "part", "seconds"]


@pytest.mark.parametrize(
    "change, words",
    (
        ({"pass": True}, "pass: Input should be a valid integer"),
        ({"pass": "1"}, "pass: Input should be a valid integer"),
        ({"pass": -1}, "pass: Input should be greater than or equal to 0"),
        ({"seconds": "1"}, "seconds: Input should be a valid number"),
        ({"rows": {}}, "rows: Input should be a valid list"),
        ({"rows": [1]}, "rows.0: Input should be a valid dictionary"),
        ({"rows": [{"mode": None}]}, "rows.0.mode: Input should be a valid string"),
        ({"part": {"mode": 1}}, "part.mode: Input should be a valid string"),
        ({"part": []}, "part: Input should be a valid dictionary"),
    ),
)
def test_the_message_names_the_key(change, words):
    with pytest.raises(ValueError) as refused:
        checked(Whole, VALUE | change)
    assert str(refused.value) == words


def test_a_missing_key_is_named():
    with pytest.raises(ValueError, match=r"^pass is missing; rows is missing; part is missing$"):
        checked(Whole, {})


@pytest.mark.timeout(20)
def test_what_would_wait_for_another_process_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    with socket.socket(socket.AF_UNIX) as here:
        here.bind(str(tmp_path / "socket"))
        for name in ("fifo", "link", "socket", "/dev/zero", "/dev/null", "/dev/tty", "."):
            with pytest.raises(OSError):
                open_file(tmp_path / name)


def test_a_pipe_of_this_process_is_read_to_its_end():
    reading, writing = os.pipe()
    if os.fork() == 0:  # a slow writer, as `<(zcat ledger.gz)` is one
        for data in (b"a", b"b"):
            os.sched_yield()
            os.write(writing, data)
        os._exit(0)
    os.close(writing)
    assert read_limited(Path(f"/dev/fd/{reading}"), 10) == b"ab"
    os.close(reading)


def test_a_pipe_has_a_limit_too():
    reading_end, writing = os.pipe()
    os.write(writing, b"0123456789x")
    os.close(writing)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        read_limited(Path(f"/dev/fd/{reading_end}"), 10)
    os.close(reading_end)


REFUSED = (
    (b"[" * (DEPTH + 1) + b"]" * (DEPTH + 1), "nested"),
    (b'{"a":' * (DEPTH + 1) + b"1" + b"}" * (DEPTH + 1), "nested"), (b'{"a": 1, "a": 1}', "twice"),
    (b'"\\ud800"', "half"), (b'"\\udc00"', "half"), (b'"\\uDfff"', "half"),
    (b"[" + b"[],[1]," * 3 + b"1]", "more than 6 values"), (b"[[[[[[[]]]]]]]", "more than 6 values"),
    (b"NaN", "not JSON"), (b"\xff", "utf-8"),
)  # fmt: skip


@pytest.mark.parametrize("text, words", REFUSED, ids=[str(text[:24]) for text, _ in REFUSED])
def test_json_that_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse_json(text, most=6 if "6" in words else reading.NODES)


def test_an_alias_counts_whenever_it_is_repeated(monkeypatch):
    monkeypatch.setattr(reading, "NODES", 20)
    assert parse_yaml(b"a: &a [1, 2]\nb: [*a, *a]\n") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
    with pytest.raises(ValueError, match="more than 20 values"):
        parse_yaml(b"a: &a [1, 2, 3, 4]\nb: [*a, *a, *a, *a, *a]\n")


def test_a_line_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONGEST_LINE", 8)
    (tmp_path / "lines").write_bytes(b"1234567\n12345678\n")
    lines = read_lines(tmp_path / "lines")
    assert next(lines) == (1, b"1234567\n")
    with pytest.raises(ValueError, match="line 2 has more than 8 bytes"):
        next(lines)
