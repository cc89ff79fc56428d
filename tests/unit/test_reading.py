"""A format is one dataclass: what `checked` makes of a mapping, and what it says of one of another kind."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from tp_invariant_recipes.reading import Count, Keys, Listed, Record, checked, open_file, read_limited


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
    found = checked(Whole, VALUE)
    assert found == Whole(1, (Named("tree"),), {"mode": "tree", "other": 2})
    assert checked(Whole, found.as_json()) == found
    assert list(found.as_json()) == ["pass", "rows", "part", "seconds"]


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
