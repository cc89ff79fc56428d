"""Signals that come at a bad moment, and several at once: a run saves and stops, and its terminal stays clean."""

import io
import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing import resource_tracker

from tests.distributed.faults import at_step, reached, wait_for_sigterm
from tests.distributed.runs.test_resume import TOY
from tests.ledgers import steps
from tp_invariant_recipes.runs import checkpoints

RUN = ("train", *TOY, "tp=1", "iters=4", "run.dir=run")


class _Interrupted(io.FileIO):
    """A log that two SIGTERMs interrupt: the launcher passes its own on while a line is written."""

    context = None

    def write(self, data):
        if self.context is not None:
            context, self.context = self.context, None
            os.kill(os.getppid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for_sigterm(context)
        return super().write(data)


def _print_and_be_stopped(context):
    raw = _Interrupted(1, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True)
    raw.context = context
    print("a line")


def _saved_and_stopped(tpi, process, step):
    assert process.wait() == 0, process.stderr
    run = json.loads((tpi.folder / "run" / "run.json").read_text())
    assert run["attempts"][-1]["outcome"] == "stopped"
    assert [saved.step for saved in checkpoints.finished(tpi.folder / "run" / "checkpoints")] == [step]
    assert len(steps(tpi.folder / "run")) == step


def test_signals_within_a_print_stop_and_save(tpi):
    """Bridge's handler prints, which Python refuses inside another print."""
    process = tpi.start(*RUN, before=at_step(2, _print_and_be_stopped))
    _saved_and_stopped(tpi, process, 2)


def test_a_terminal_that_hangs_up_stops_and_saves(tpi):
    """It sends SIGHUP to every process, often twice."""
    process = tpi.start(*RUN, before=at_step(2, wait_for_sigterm))
    process.until(reached(tpi.folder, 2))
    for number in (signal.SIGHUP, signal.SIGHUP):
        os.kill(process.pid, number)
    _saved_and_stopped(tpi, process, 2)


def _die_with_a_semaphore(context):
    context.kept = multiprocessing.get_context("spawn").Semaphore()
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out


def test_a_killed_rank_leaves_no_warning_on_the_terminal(tpi):
    def plant():
        tracker = resource_tracker._resource_tracker
        tracker._fd = tracker._pid = None  # pytest's own
        tracker.ensure_running()  # the launcher's, whose output is the terminal
        at_step(2, _die_with_a_semaphore)()

    process = tpi(*RUN, before=plant, status=2)
    log = tpi.folder / "run" / "logs" / "rank-0.log"
    deadline = time.monotonic() + 20
    while "leaked semaphore" not in process.stderr + log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "leaked semaphore" in log.read_text()
    assert "resource_tracker" not in process.stderr
