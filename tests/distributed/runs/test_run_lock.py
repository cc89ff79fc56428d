# SPDX-License-Identifier: Apache-2.0
"""Two launchers in one run directory: one trains, the other is refused and changes nothing. And runs that end early."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.distributed.faults import at_step, reached, wait_for_sigterm
from tests.distributed.small_models import SAVED
from tests.ledgers import agree, steps

RUN = ("train", *SAVED)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run directory but the lock, into which its holder writes signs of life."""
    return {
        str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.suffix != ".lock"
    }


def _refuse_to_write_without_the_lock() -> None:
    """For the launcher and its ranks: configuration, run.json, manifests."""
    from tp_invariant_recipes.runs import checkpoints, lock, run_dir

    for module in (checkpoints, run_dir):

        def watched(file, data, original=module.write_atomically):
            assert lock._held, f"{file} is written without the lock"
            return original(file, data)

        module.write_atomically = watched


def wait_for_the_others(context) -> None:
    """Until the test has made the file."""
    while not Path("go").exists():
        time.sleep(0.02)


def test_a_second_launcher_is_refused_before_it_writes_anything(whole, tpi):
    hold = at_step(4, wait_for_the_others)

    def plant() -> None:
        hold()
        _refuse_to_write_without_the_lock()

    first = tpi.start(*RUN, "run.dir=run", before=plant)
    first.until(reached(tpi.folder, 4))
    run = tpi.folder / "run"
    before = contents(run)
    for command in (("train", "--resume", "run"), (*RUN, "--continue", "run.dir=run")):
        second = tpi(*command, status=2)
        assert f"run is being trained by pid {first.pid} on {os.uname().nodename} since " in second.stderr
    assert contents(run) == before
    assert tpi("compare", "run", "run").status == 0  # readers need no lock
    (tpi.folder / "go").touch()
    assert first.wait() == 0, first.stderr
    assert steps(run) == steps(whole)
    assert (run / "write.lock").read_bytes() == b""


def _an_hour_passes(context) -> None:
    context.state.start_time -= 3600


def test_a_run_that_ends_early_is_not_completed(tpi):
    limited = (*RUN, "tp=1", "save=0", "train.exit_duration_in_mins=1", "run.dir=run")
    ended = tpi(*limited, before=at_step(3, _an_hour_passes), status=2)
    assert "the ranks ended at step 3 of 4, and nothing had failed" in ended.stderr
    assert _outcome(tpi) == "failed"


@pytest.mark.release
def test_a_signal_that_only_a_rank_gets_does_not_complete_the_run(whole, tpi):
    process = tpi.start(*RUN, "save=0", "run.dir=run", before=at_step(3, _term_oneself))
    assert process.wait() == 2
    assert "the ranks ended at step 3 of 4, and nothing had failed; the reason is in " in process.stderr
    assert "completed" not in process.stderr
    assert _outcome(tpi) == "failed"
    for _ in range(2):  # the second finds nothing left to train
        resumed = tpi("train", "--resume", "run", "save=2", status=0)
        assert "completed at step 4 of 4" in resumed.stderr
        assert agree(steps(tpi.folder / "run"), steps(whole))


def _term_oneself(context) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    wait_for_sigterm(context)


@pytest.mark.release
def test_a_run_with_an_exit_interval_is_completed_there_with_its_last_step(whole, tpi):
    """Bridge leaves without a word to callbacks."""
    done = tpi(*RUN, "save=0", "train.exit_interval=3", "run.dir=run", status=0)
    assert "completed at step 3 of 3" in done.stderr
    assert agree(steps(tpi.folder / "run"), steps(whole)[:3])


def _outcome(tpi) -> str:
    from tp_invariant_recipes.runs.restarts import read_restarts
    from tp_invariant_recipes.runs.run_dir import RunDir

    return read_restarts(RunDir(tpi.folder / "run"))[-1].outcome
