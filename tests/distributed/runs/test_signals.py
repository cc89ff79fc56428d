# SPDX-License-Identifier: Apache-2.0
"""Signals that come at a bad moment, and several at once: a run saves and stops, and its terminal stays clean."""

import io
import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing import resource_tracker
from pathlib import Path

from tests.distributed.faults import at_step, wait_for_sigterm
from tests.distributed.small_models import SAVED
from tests.ledgers import steps
from tp_invariant_recipes.runs import checkpoints

RUN = ("train", *SAVED, "tp=1", "save=0", "run.dir=run")


class _Interrupted(io.FileIO):
    """A log that signals interrupt while a line is written.

    A terminal that hangs up sends SIGHUP to every process, often twice; the launcher passes SIGTERM on.
    """

    context = None

    def write(self, data):
        if self.context is not None:
            context, self.context = self.context, None
            for _ in range(2):
                os.kill(os.getppid(), signal.SIGHUP)
                os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for_sigterm(context)
        return super().write(data)


def _print_and_be_stopped(context):
    import yaml
    from megatron.bridge.training import train

    assert yaml.SafeDumper is yaml.CSafeDumper  # a save writes the configuration
    sys.modules.pop("mlflow", None)
    train.end_active_mlflow_run("KILLED")
    assert "mlflow" not in sys.modules
    raw = _Interrupted(1, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True)
    raw.context = context
    print("a line")


def test_a_terminal_that_hangs_up_within_a_print_stops_and_saves(tpi):
    """Bridge's handler prints, which Python refuses inside another print."""
    tpi(*RUN, before=at_step(2, _print_and_be_stopped), status=0)
    run = json.loads((tpi.folder / "run" / "run.json").read_text())
    assert run["attempts"][-1]["outcome"] == "stopped"
    assert [saved.step for saved in checkpoints.finished(tpi.folder / "run" / "checkpoints")] == [2]
    assert len(steps(tpi.folder / "run")) == 2


def _die_with_a_semaphore(context):
    context.kept = multiprocessing.get_context("spawn").Semaphore()
    Path("semaphore").write_text(f"/dev/shm/sem.{context.kept._semlock.name.removeprefix('/')}")
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out


def test_a_killed_rank_leaves_no_warning_on_the_terminal(tpi):
    """Neither from the launcher's resource tracker nor from the end of the rank's log, which the launcher prints."""

    def plant():
        tracker = resource_tracker._resource_tracker
        tracker._fd = tracker._pid = None  # pytest's own
        tracker.ensure_running()  # the launcher's, whose output is the terminal
        at_step(2, _die_with_a_semaphore)()

    process = tpi(*RUN, before=plant, status=2)
    semaphore = Path((tpi.folder / "semaphore").read_text())
    deadline = time.monotonic() + 20
    while semaphore.exists() and time.monotonic() < deadline:  # the rank's tracker warns before it removes
        time.sleep(0.1)
    assert not semaphore.exists()
    log = (tpi.folder / "run" / "logs" / "rank-0.log").read_text()
    assert "resource_tracker" not in process.stderr + log
