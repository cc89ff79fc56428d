"""The progress file as it grows: half a line is nothing yet, and a line of another kind is not dropped in silence."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from tp_invariant_recipes.launch.progress import Bar, Lines, Tail
from tp_invariant_recipes.runs.run_dir import RunDir

STEP = {"step": 1, "loss": 1.5, "tokens": 8, "seconds": 0.5}


def line(**changes: object) -> str:
    return json.dumps(STEP | changes) + "\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return RunDir(tmp_path).progress


def steps(tail: Tail) -> list[int]:
    return [event.step for event in tail.new()]


def test_half_a_line_waits_for_its_end(file):
    tail = Tail(file, 9)
    assert steps(tail) == []
    half, rest = line(step=2)[:20], line(step=2)[20:]
    file.write_text(line() + half)
    assert steps(tail) == [1]
    file.write_text(line() + half + rest)
    assert steps(tail) == [2]
    assert tail.strange is None


def test_a_torn_line_is_passed_over_with_what_follows_on_it(file):
    tail = Tail(file, 9)
    file.write_text(line() + line(step=2)[:20] + line(step=3) + line(step=4))
    assert steps(tail) == [1, 4]
    assert tail.strange is None


def test_a_line_of_another_kind_is_said_once(file):
    tail = Tail(file, 9)
    file.write_text(line(tokens="8") + line(step=2) + line(loss=[]))
    assert steps(tail) == [2]
    assert tail.strange == f"{file}: a line of another kind is not shown: tokens: Input should be a valid integer"


@pytest.mark.parametrize("kind", (Bar, Lines))
def test_a_watcher_says_so(file, kind):
    said = io.StringIO()
    plan = SimpleNamespace(run_dir=RunDir(file.parent), steps=9, start=0, device="cpu", layout=SimpleNamespace(world=2))
    with kind(plan, Console(file=said, width=300)) as watch:
        for text in (line(), "[1]\n", line(step=2), "{}\n"):
            with file.open("a") as stream:
                stream.write(text)
            watch()
    assert ("starting 2 cpu ranks …" in said.getvalue()) == (kind is Lines)
    assert said.getvalue().count("a line of another kind is not shown: Input should be a valid dictionary") == 1
