# SPDX-License-Identifier: Apache-2.0
"""Random kills, each followed by the same command at once: the run ends as if nothing had happened."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.faults import ranks_of
from tests.distributed.small_models import SAVED
from tests.forks import Process, Tpi
from tests.ledgers import agree, steps
from tp_invariant_recipes.runs import checkpoints

pytestmark = pytest.mark.release

SEED = 20261122
KILLS = 20
STEPS = 30
RUN = ("train", *SAVED, f"iters={STEPS}", "save=3", "run.dir=run", "--continue")


def _wait(process: Process, condition: Callable[[], bool]) -> None:
    while process.poll() is None and not condition():
        time.sleep(0.002)


def _reach(process: Process, run: Path, chance: random.Random) -> None:
    """Wait for a moment of this attempt: somewhere in its start, after some steps, or while a checkpoint is written."""

    def unfinished() -> set[Path]:
        return {p for p in (run / "checkpoints").glob("iter_*") if not (p / checkpoints.MANIFEST).exists()}

    longest, target, before = chance.choice((5.0, 0.3, 0.15)), len(steps(run)) + chance.randint(1, 6), unfinished()
    if longest == 0.3:
        _wait(process, lambda: len(steps(run)) >= target)
    elif longest == 0.15:
        _wait(process, lambda: bool(unfinished() - before))
    until = time.monotonic() + chance.uniform(0, longest)
    _wait(process, lambda: time.monotonic() > until)


def _kill(process: Process, chance: random.Random) -> None:
    """Kill a rank, the launcher, or all of them."""
    victims = {"rank": ranks_of(process.pid) or [process.pid], "launcher": [process.pid], "all": [-process.pid]}
    victim, number = chance.choice([*victims]), chance.choice((signal.SIGKILL, signal.SIGTERM))
    print(f"{victim} {number.name}")
    os.kill(chance.choice(victims[victim]), number)


def _attempts(run: Path) -> list[dict]:
    return json.loads((run / "run.json").read_text())["attempts"] if (run / "run.json").exists() else []


@pytest.mark.timeout(1200)
def test_a_run_that_is_killed_repeatedly_ends_as_if_it_was_not(shared: Tpi, tpi: Tpi):
    chance = random.Random(SEED)
    print(f"seed {SEED}")
    shared(*RUN, status=0)
    kills = runs = 0
    while kills < KILLS:
        folder = tpi.folder / str(runs)
        folder.mkdir()
        kills += _killed_to_its_end(Tpi(folder), chance, KILLS - kills)
        runs += 1
        assert agree(steps(folder / "run"), steps(shared.folder / "run"))
    print(f"{kills} kills in {runs} runs")


def _killed_to_its_end(tpi: Tpi, chance: random.Random, most: int) -> int:
    """Kill one run until it is done, or `most` times. Returns how often a process was killed."""
    run, kills, done = tpi.folder / "run", 0, False
    while not done:
        saved = max((c.step for c in checkpoints.finished(run / "checkpoints")), default=0)
        before = _attempts(run)
        process = tpi.start(*RUN, before=lambda: os.setpgid(0, 0))
        _wait(process, lambda: os.getpgid(process.pid) == process.pid)  # noqa: B023 -- used in this round only
        if kills < most:
            _reach(process, run, chance)
        if kills < most and process.poll() is None:
            _kill(process, chance)
            kills += 1
        status = process.wait()
        assert "Traceback" not in process.stderr, process.stderr
        assert "is being trained by" not in process.stderr  # what a killed launcher leaves never refuses the next
        for checkpoint in checkpoints.finished(run / "checkpoints"):
            checkpoint.verify()
        if len(now := _attempts(run)) > len(before):
            assert now[-1]["from_step"] >= saved  # no saved step is computed again
        done = status == 0 and f"completed at step {STEPS} of {STEPS}" in process.stderr
    return kills
