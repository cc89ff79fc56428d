"""A ledger in which one recorded thing is another is never identical to the sound one: it differs or is refused.

tests/unit/ledger/test_ledger_record.py flips bits and exchanges lines.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.ledger.test_forged_files import forged, places

SEED = 31
FEW, ALL = 10, 500

# Keys of the header that runs with equal bits may have of their own.
FREE = {"layout", "numerics", "versions", "device", "environment", "notes"}
UNTRACED = ("('trace',) is null", "('trace',) is missing")  # a run chooses the steps that it traces
FOR_PEOPLE = "value"  # of a number: what people read beside its bits


def changes(lines: list[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """A value or a key of one line made another one, bytes cut or replaced, in the header and in a step."""
    for number in (0, 2):
        whole = json.loads(lines[number])
        free = {str(path) for path in places(whole) if path[0] in FREE or FOR_PEOPLE in path}
        for what, data in forged(whole):
            if what in UNTRACED:
                continue
            if what.rpartition(" is ")[0] not in free and b"\n" not in data and not _same(data, whole):
                yield f"line {number + 1}: {what}", [*lines[:number], data, *lines[number + 1 :]]


def _same(data: bytes, whole: object) -> bool:
    """Whether a forged line holds what it held: `-1` in the place of `-1`."""
    try:
        return json.dumps(json.loads(data)) == json.dumps(whole)
    except (ValueError, RecursionError):
        return False


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", (FEW, pytest.param(ALL, marks=pytest.mark.release)))
def test_a_changed_ledger_is_never_identical(attack, run, count):
    sound = Path("other/ledger.jsonl").read_bytes().splitlines()
    rng = random.Random(SEED)
    made = list(changes(sound))
    wrong = {}
    for what, lines in rng.sample(made, min(count, len(made))):
        Path("run/ledger.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
        pair = rng.choice((("run", "other"), ("other", "run")))
        if result := attack("compare", *pair, allowed=(1, 2)):
            wrong[what] = result
    assert wrong == {}


def test_a_sound_copy_is_identical_and_a_shorter_one_as_far_as_it_goes(attack, cli, run):
    assert attack("compare", "run", "other", allowed=(0,)) is None
    lines = Path("other/ledger.jsonl").read_bytes().splitlines(keepends=True)
    for end in (b"", lines[-1][:20], b"\n", bytes(64)):
        Path("run/ledger.jsonl").write_bytes(b"".join(lines[:-1]) + end)
        assert "identical: 3 of 4 steps" in cli("compare", "run", "other").out
