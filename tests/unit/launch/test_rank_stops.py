# SPDX-License-Identifier: Apache-2.0
"""When a request to stop becomes stronger."""

import functools
import multiprocessing
import os
import signal
import time

import pytest

from tp_invariant_recipes.launch import ranks
from tp_invariant_recipes.launch.ranks import RankFailed, Stop
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.training import rank


def _deaf(ready) -> None:
    """A rank in a loop that never looks at signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    while True:
        time.sleep(60)


@pytest.fixture
def deaf():
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_deaf, args=(ready,))
    process.start()
    assert ready.wait(20)
    yield process
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(ranks, "PATIENCE", 0.3)
    monkeypatch.setattr(ranks, "POLL", 0.01)


@pytest.mark.timeout(30)
def test_a_rank_that_does_not_answer_before_the_first_step_is_killed(deaf):
    began = time.monotonic()
    ended = ranks._watch([deaf], Stop(requests=1), lambda: None, lambda: False, lambda n: False)
    assert ended == {0}
    assert time.monotonic() - began > 0.3
    deaf.join()
    assert deaf.exitcode == -signal.SIGKILL


@pytest.mark.timeout(30)
def test_one_that_may_be_saving_gets_the_time_it_needs(deaf):
    """A second request ends it, as always."""
    stop, began = Stop(requests=1), time.monotonic()

    def tick() -> None:
        if time.monotonic() - began > 0.6:
            stop.requests = 2

    assert ranks._watch([deaf], stop, tick, lambda: True, lambda n: False) == {0}
    assert time.monotonic() - began > 0.6


def test_a_hangup_asks_once_to_save_and_stop(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)  # pytest may run under nohup
    with ranks.stopping() as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
        assert (stop.requests, stop.interrupted, stop.resumable) == (1, False, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requests == 2


@pytest.mark.parametrize("number", (signal.SIGUSR1, signal.SIGUSR2))  # SLURM's as we ask for it; submitit's
def test_the_signal_of_a_job_that_ends_asks_to_go_on_elsewhere(number):
    with ranks.stopping() as stop:
        os.kill(os.getpid(), number)
    assert (stop.signals, stop.resumable) == (1, True)


def test_nohup_stays_in_force():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ranks.stopping() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signals == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def _stopped_by(code: int, run_dir, rank_info) -> None:
    """A rank that ends with a status of its own while it is asked to stop."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    (run_dir.path / "started").touch()
    time.sleep(20)


@pytest.mark.timeout(60)
def test_a_rank_that_fails_while_it_is_asked_to_stop_has_failed(tmp_path):
    """A full disk, say, under the checkpoint that it saves: the run is not one that stopped as asked."""
    stop = Stop()

    def tick() -> None:
        if (tmp_path / "started").exists() and not stop.requests:
            stop.requests = 1

    infos = [rank.RankInfo(0, 0, 1, 1, "127.0.0.1", (1,))]
    with pytest.raises(RankFailed):
        ranks.run(RunDir(tmp_path), "cpu", infos, tick, stop, rank_fn=functools.partial(_stopped_by, 3))
