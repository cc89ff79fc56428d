# SPDX-License-Identifier: Apache-2.0
"""A rank's beginning, and what a pass leaves behind."""

import errno
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
import weakref
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from tp_invariant_recipes.launch import ranks
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.training import heartbeat, rank
from tp_invariant_recipes.training.heartbeat import Heartbeats, Phase


class Closed:
    """A gate that nobody opens."""

    def wait_for_all(self) -> None:
        raise TimeoutError


def test_a_rank_does_nothing_before_all_have_started(monkeypatch, tmp_path):
    """One that met the launcher's store while others are forked could leave them a lock that nobody unlocks."""
    monkeypatch.setattr(rank, "_die_with_launcher", lambda: None)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    rank_info = rank.RankInfo(0, 0, 1, 1, "127.0.0.1", (1,))
    with pytest.raises(TimeoutError):
        rank.main(0, str(tmp_path), [rank_info], lambda *_: sys.exit("started"), Closed())
    assert "MASTER_PORT" not in os.environ
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(20)
def test_ranks_that_are_killed_while_they_wait_stop_nobody():
    """A multiprocessing.Event waits for them for ever: a random kill has found that."""
    context = multiprocessing.get_context("fork")
    heartbeats = Heartbeats(3, context)
    waiting = [context.Process(target=heartbeats.wait_for_all) for _ in range(3)]
    for process in waiting:
        process.start()
    time.sleep(0.2)  # they wait, wherever in it
    for process in waiting[:2]:
        process.kill()
        process.join()
    assert waiting[2].is_alive()
    heartbeats.release_ranks()
    waiting[2].join()
    assert waiting[2].exitcode == 0


def _write_started(run_dir, rank_info):
    (run_dir.path / f"started{rank_info.rank}").touch()


def test_spawned_ranks_find_what_the_launcher_gives_them(monkeypatch, tmp_path):
    """They unpack it after the launcher's functions have returned, which must keep it until then."""
    monkeypatch.setattr(ranks, "start_method", lambda device: "spawn")
    infos = [rank.RankInfo(0, 0, 1, 1, "127.0.0.1", (1,))]
    outcome = ranks.run(RunDir(tmp_path), "gpu", infos, lambda: None, ranks.Stop(), rank_fn=_write_started)
    assert outcome is ranks.Outcome.COMPLETED
    assert {file.name for file in tmp_path.glob("started*")} == {"started0"}


def _warn(run_dir, rank_info):
    warnings.warn("it is experimental", stacklevel=1)


def test_warnings_of_megatron_fail_no_rank_of_a_program_for_which_they_are_errors(tmp_path):
    infos = [rank.RankInfo(0, 0, 1, 1, "127.0.0.1", (1,))]
    with warnings.catch_warnings(action="error"):
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # threads of this process
        outcome = ranks.run(RunDir(tmp_path), "cpu", infos, lambda: None, ranks.Stop(), rank_fn=_warn)
    assert outcome is ranks.Outcome.COMPLETED


def _wrapped(code: int) -> RuntimeError:
    """As writers of checkpoints wrap what the system says."""
    error = RuntimeError("one of the writers failed")
    error.__context__ = OSError(code, os.strerror(code))
    return error


@pytest.mark.parametrize(
    "code, says",
    (
        (errno.ENOSPC, "disk full: "), (errno.EDQUOT, "disk full: the quota"), (errno.EIO, "rank 0 failed: "),
        (errno.EMFILE, "too many files are open"),
    ),
)  # fmt: skip
def test_the_reason_of_a_rank_says_disk_full_though_its_log_has_no_room(monkeypatch, tmp_path, code, says):
    run = RunDir(tmp_path)
    run.logs.mkdir()
    with open("/dev/full", "w", buffering=1) as log:
        monkeypatch.setattr(sys, "stderr", log)
        rank._write_failure(run, 0, _wrapped(code))
        with suppress(OSError):
            log.close()
    assert json.loads(run.failure(0).read_text())["errno"] == code
    assert str(ranks._failure(run, {0: 1})).startswith(says)


def test_of_a_huge_log_the_last_lines_are_read(tmp_path):
    log = tmp_path / "rank-0.log"
    log.touch()
    os.truncate(log, 1 << 40)
    with log.open("ab") as stream:
        stream.write(b"\nthe last\n")
    assert ranks._tail(log)[-1] == "  the last"


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2))
def test_a_rank_ignores_what_is_for_its_launcher(number):
    context = multiprocessing.get_context("fork")

    def begin() -> None:
        rank._die_with_launcher()
        os.kill(os.getpid(), number)

    process = context.Process(target=begin)
    process.start()
    process.join(20)
    assert process.exitcode == 0


def test_signs_of_a_step_have_its_number_and_an_evaluation_ends_with_one(monkeypatch):
    heartbeats = Heartbeats(1, multiprocessing.get_context("fork"))
    monkeypatch.setattr(heartbeat, "_mine", (heartbeats, 0))
    first, last = heartbeat.First(lambda step, start: (step, start) == (5, 4)), heartbeat.Last()

    def signs(method, step) -> tuple:
        method(SimpleNamespace(state=SimpleNamespace(train_state=SimpleNamespace(step=step))))
        return heartbeats[0].phase, heartbeats[0].step

    assert signs(first.on_train_start, 4) == (Phase.READY, 4)
    assert signs(first.on_train_step_start, 4) == (Phase.LONG_STEP, 5)
    assert signs(last.on_train_step_end, 5) == (Phase.BETWEEN, 5)
    assert signs(first.on_train_step_start, 5) == (Phase.STEP, 6)
    assert signs(first.on_eval_step_start, 5)[0] is Phase.EVALUATING
    assert signs(last.on_eval_end, 5)[0] is Phase.BETWEEN


class Model:
    """Held by a hook on its weight's gradient, as Megatron's DistributedDataParallel is."""

    def __init__(self) -> None:
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

        self.weight = torch.nn.Parameter(torch.ones(2))
        self.accumulate = self.weight.expand_as(self.weight).grad_fn.next_functions[0][0]
        self.accumulate.register_hook(lambda *_: self)
        self.dispatcher = MoEAlltoAllTokenDispatcher.__new__(MoEAlltoAllTokenDispatcher)
        self.dispatcher.probs = self.weight * 2


@pytest.fixture
def collector():
    gc.disable()  # as Bridge does in training
    yield
    gc.enable()


def test_a_model_with_experts_is_gone_after_its_pass(collector):
    from tp_invariant_recipes.training.settle import settle

    model = weakref.ref(Model())
    gone = weakref.proxy(torch.nn.Module())  # what it stood for is no more
    gc.collect()
    assert model() is not None  # the collector alone does not find it
    settle()
    assert model() is None
    del gone
