"""A ledger in which one recorded thing is another is never identical to the sound one: it differs or is refused."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.ledger.test_forged_files import forged, places

SEED = 31
FEW, ALL = 20, 500

# Keys of the header that runs with equal bits may have of their own.
FREE = {"layout", "numerics", "versions", "device", "environment", "notes"}
UNTRACED = ("('trace',) is null", "('trace',) is missing")  # a run chooses the steps that it traces
FOR_PEOPLE = "value"  # of a number: what people read beside its bits


def values(lines: list[bytes]) -> Iterator[tuple[str, list[bytes]]]:
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


def orders(lines: list[bytes], rng: random.Random) -> Iterator[tuple[str, list[bytes]]]:
    """Lines left out, twice, exchanged, of another run, or with something between them."""
    for at in range(len(lines)):
        if at < len(lines) - 1:  # a run that ended earlier is identical as far as it goes
            yield f"without line {at + 1}", lines[:at] + lines[at + 1 :]
            yield f"line {at + 1} is empty", [*lines[:at], b"", *lines[at + 1 :]]
        yield f"line {at + 1} twice", lines[: at + 1] + lines[at:]
        yield f"zeros before line {at + 1}", [*lines[:at], bytes(64), *lines[at:]]
        other = (at + 1) % len(lines)
        moved = list(lines)
        moved[at], moved[other] = moved[other], moved[at]
        yield f"lines {at + 1} and {other + 1} exchanged", moved
    for digit in (b"7", b"f"):
        digests = lines[2].replace(b'"c' + b"c" * 31, b'"' + digit * 32)
        yield f"digests of {digit!r}", [*lines[:2], digests, *lines[3:]]


def flips(lines: list[bytes], rng: random.Random) -> Iterator[tuple[str, list[bytes]]]:
    """One hexadecimal digit of any bits or digest is another."""
    for _ in range(ALL):
        number = rng.randrange(len(lines))
        line = lines[number]
        places = [n for n in range(len(line)) if line[n : n + 1] in b"0123456789abcdef" and _in_hex(line, n)]
        at = rng.choice(places)
        digit = rng.choice([d for d in b"0123456789abcdef" if d != line[at]])
        yield (
            f"digit {at} of line {number + 1}",
            [*lines[:number], line[:at] + bytes([digit]) + line[at + 1 :], *lines[number + 1 :]],
        )


def _in_hex(line: bytes, at: int) -> bool:
    """Whether a byte belongs to a text of 32 digits, or to a number's bits."""
    start, end = line.rfind(b'"', 0, at) + 1, line.find(b'"', at)
    text = line[start:end].removeprefix(b"f32:").removeprefix(b"f64:")
    return len(text) in (8, 16, 32, 64) and not text.strip(b"0123456789abcdef") and at >= end - len(text)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", (FEW, pytest.param(ALL, marks=pytest.mark.release)))
@pytest.mark.parametrize("cases", (values, orders, flips))
def test_a_changed_ledger_is_never_identical(attack, run, cases, count):
    sound = Path("other/ledger.jsonl").read_bytes().splitlines()
    rng = random.Random(SEED)
    made = list(cases(sound) if cases is values else cases(sound, rng))
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
