# SPDX-License-Identifier: Apache-2.0
"""The progress file as it grows: half a line is nothing yet."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from tp_invariant_recipes.launch.progress import Bar, Lines, Tail
from tp_invariant_recipes.machine import progress
from tp_invariant_recipes.runs.run_dir import RunDir

STEP = {"step": 1, "loss": 1.5, "tokens": 8, "seconds": 0.5}


def progress_line(**changes: object) -> str:
    return json.dumps(STEP | changes) + "\n"


@pytest.fixture
def progress_file(tmp_path: Path) -> Path:
    return RunDir(tmp_path).progress


def new_steps(tail: Tail) -> list[int]:
    return [event.step for event in tail.new()]


def test_half_a_line_waits_for_its_end(progress_file):
    tail = Tail(progress_file, 9)
    assert new_steps(tail) == []
    half, rest = progress_line(step=2)[:20], progress_line(step=2)[20:]
    progress_file.write_text(progress_line() + half)
    assert new_steps(tail) == [1]
    progress_file.write_text(progress_line() + half + rest)
    assert new_steps(tail) == [2]


def test_a_torn_line_is_passed_over_with_what_follows_on_it_and_so_is_one_of_another_kind(progress_file):
    tail = Tail(progress_file, 9)
    torn = progress_line(step=2)[:20] + progress_line(step=3)
    progress_file.write_text(progress_line() + torn + "[1]\n{}\n" + progress_line(step=4))
    assert new_steps(tail) == [1, 4]


def test_pace_and_remaining_time_are_those_of_the_steps_after_the_first(progress_file):
    tail = Tail(progress_file, 9)
    progress_file.write_text(progress_line(seconds=40.0))
    assert new_steps(tail) == [1]
    assert (tail.tokens_per_second(), tail.seconds_remaining()) == (8 / 40.0, 8 * 40.0)  # there is no other step
    progress_file.write_text(progress_line(seconds=40.0) + progress_line(step=2) + progress_line(step=3, seconds=1.5))
    assert new_steps(tail) == [2, 3]
    assert (tail.tokens_per_second(), tail.seconds_remaining()) == (16 / 2.0, 6 * 1.0)


@pytest.fixture
def plan(tmp_path: Path) -> SimpleNamespace:
    layout = SimpleNamespace(world=2)
    return SimpleNamespace(run_dir=RunDir(tmp_path), steps=9, start=0, device="cpu", layout=layout)


@pytest.mark.parametrize("kind", (Bar, Lines))
def test_a_watcher_shows_each_step(plan, progress_file, kind):
    output = io.StringIO()
    with kind(plan, Console(file=output, width=300)) as watch:
        progress_file.write_text(progress_line())
        watch()
    assert ("starting 2 cpu ranks …" in output.getvalue()) == (kind is Lines)
    assert "loss 1.5000  16 tokens/s" in output.getvalue()


def test_the_log_of_an_earlier_attempt_is_not_repeated(plan):
    plan.run_dir.logs.mkdir()
    plan.run_dir.bridge_log.write_text("earlier\n")
    output = io.StringIO()
    with Lines(plan, Console(file=output), log=True) as tick:
        with plan.run_dir.bridge_log.open("a") as log:
            log.write("new\n")
        tick()
    assert output.getvalue().splitlines() == ["starting 2 cpu ranks …", "new"]


def test_a_count_estimates_the_rest_from_what_was_done_since_it_began(monkeypatch):
    now, output = [0.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Counter(Console(file=output, width=80)) as counter:
        show = counter.counting("scoring:", " sequences")
        for now[0], done in ((0.0, 50), (1.0, 51), (20.0, 60), (21.0, 61), (40.0, 99)):
            show(done, 100)
        show(100, 100)
    assert output.getvalue().splitlines() == [
        "scoring: 60 of 100 sequences, about 0:01:20 left",
        "scoring: 99 of 100 sequences",  # less than two seconds is no word worth
    ]
