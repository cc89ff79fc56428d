"""Random kills, each followed by the same command at once: the run ends as if nothing had happened."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forks import Process, Tpi
from tests.ledgers import agree, steps
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.runs import checkpoints

SEED = 20261122
KILLS = 20
STEPS = 30
RUN = (
    *("train", "qwen3_toy", "tp=2", f"iters={STEPS}", "save=3", "seq=32", "gbs=2", "model.num_layers=1"),
    *("numerics=stock", "run.dir=run", "--continue"),
)
VICTIMS = ("launcher", "rank", "group")
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
MOMENTS = ("starting", "training", "saving")

pytestmark = pytest.mark.release


def _own_group() -> None:
    os.setpgid(0, 0)


def _ranks(launcher: int) -> list[int]:
    try:
        text = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    except OSError:
        return []
    return list(map(int, text.split()))


def _lines(run: Path) -> int:
    ledger = run / "ledger.jsonl"
    return ledger.read_bytes().count(b"\n") if ledger.exists() else 0


def _unfinished(run: Path) -> set[str]:
    """Folders of checkpoints that are being written."""
    return {p.name for p in (run / "checkpoints").glob("iter_*") if not (p / checkpoints.MANIFEST).exists()}


def _wait(process: Process, condition: Callable[[], bool]) -> None:
    while process.poll() is None and not condition():
        time.sleep(0.002)


def _reach(process: Process, run: Path, moment: str, chance: random.Random) -> None:
    """Wait for a moment of this attempt: somewhere in its start, after some steps, or while a checkpoint is written."""
    if moment == "training":
        target = _lines(run) + chance.randint(1, 6)
        _wait(process, lambda: _lines(run) >= target)
    elif moment == "saving":
        before = _unfinished(run)
        _wait(process, lambda: bool(_unfinished(run) - before))
    longest = {"starting": 5.0, "training": 0.3, "saving": 0.15}[moment]
    until = time.monotonic() + chance.uniform(0, longest)
    _wait(process, lambda: time.monotonic() > until)


def _kill(process: Process, victim: str, number: signal.Signals, chance: random.Random) -> str:
    """Send the signal. Returns who got it: a launcher without ranks gets that of its ranks."""
    ranks = _ranks(process.pid)
    if victim == "group":
        os.killpg(process.pid, number)
    elif victim == "rank" and ranks:
        os.kill(chance.choice(ranks), number)
    else:
        os.kill(process.pid, number)
        return "launcher"
    return victim


def _attempts(run: Path) -> list[dict]:
    return json.loads((run / "run.json").read_text())["attempts"] if (run / "run.json").exists() else []


def _intact(run: Path) -> None:
    """Check what a killed run has left: files can be read, and checkpoints are as their manifests say."""
    _attempts(run)
    if (run / "ledger.jsonl").exists():
        read(run / "ledger.jsonl")
    for checkpoint in checkpoints.finished(run / "checkpoints"):
        checkpoint.verify()


@pytest.mark.timeout(1200)
def test_a_run_that_is_killed_repeatedly_ends_as_if_it_was_not(shared: Tpi, tpi: Tpi):
    chance = random.Random(SEED)
    print(f"seed {SEED}")
    shared(*RUN, status=0)
    expected = steps(shared.folder / "run")
    kills = runs = 0
    while kills < KILLS:
        folder = tpi.folder / str(runs)
        folder.mkdir()
        kills += _killed_to_its_end(Tpi(folder), chance, KILLS - kills)
        runs += 1
        assert agree(steps(folder / "run"), expected)
    print(f"{kills} kills in {runs} runs")


def _killed_to_its_end(tpi: Tpi, chance: random.Random, most: int) -> int:
    """Kill one run until it is done, or `most` times. Returns how often a process was killed."""
    run, kills, done = tpi.folder / "run", 0, False
    while not done:
        saved = max((c.step for c in checkpoints.finished(run / "checkpoints")), default=0)
        before = _attempts(run)
        process = tpi.start(*RUN, before=_own_group)
        fault = (chance.choice(MOMENTS), chance.choice(VICTIMS), chance.choice(SIGNALS))
        if kills < most:
            _wait(process, lambda: os.getpgid(process.pid) == process.pid)  # noqa: B023 -- used in this round only
            _reach(process, run, fault[0], chance)
        if kills < most and process.poll() is None:
            victim = _kill(process, *fault[1:], chance)
            kills += 1
            print(f"{fault[1]}→{victim} {fault[2].name} {fault[0]} at line {_lines(run)}")
        status = process.wait()
        assert "Traceback" not in process.stderr, process.stderr
        assert "is being trained by" not in process.stderr  # what a killed launcher leaves never refuses the next
        _intact(run)
        if len(now := _attempts(run)) > len(before):
            assert now[-1]["from_step"] >= saved  # no saved step is computed again
        done = status == 0 and f"completed at step {STEPS} of {STEPS}" in process.stderr
    return kills
