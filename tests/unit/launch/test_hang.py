# SPDX-License-Identifier: Apache-2.0
"""Ranks that hang, die without a word, or are only slow: real processes under the launcher, that train nothing."""

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.launch import hang, ranks
from tp_invariant_recipes.launch.hang import HangWatch, RankState, message, suspects
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.training import rank
from tp_invariant_recipes.training.heartbeat import Limits, Phase, Sign, limits, sign, takes_long
from tp_invariant_recipes.training.rank import RankInfo

SHORT = Limits(step=0.4, long_step=60.0, alone=60.0)
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def launched(tmp_path: Path) -> Callable[..., ranks.Outcome]:
    """Ranks that are in step 4, of which each then does what its own function says."""
    import torch.distributed  # noqa: F401 -- here, or each rank would import it while the clock runs

    def launched(*functions: Callable[[], None], limits: Limits | None = SHORT, tick=lambda: None) -> ranks.Outcome:
        run_dir = RunDir(tmp_path / "run")

        def rank_fn(run_dir: RunDir, info: RankInfo) -> None:
            sign(Phase.STEP, 4)
            functions[info.rank]()

        infos = [RankInfo(n, n, len(functions), len(functions), "127.0.0.1", (1,)) for n in range(len(functions))]
        return ranks.run(run_dir, "cpu", infos, tick, ranks.Stop(), rank_fn=rank_fn, limits=limits)

    return launched


def sleep_for_ever() -> None:
    while True:
        time.sleep(60)


def wait_in_a_collective() -> None:
    """As a rank does whose partner never comes."""
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)


def deaf_rank() -> None:
    """As a rank in a system call that nothing interrupts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    sleep_for_ever()


def failure(launched, *functions, **settings) -> str:
    with pytest.raises(ranks.RankFailed) as error:
        launched(*functions, **settings)
    return str(error.value)


def test_the_rank_that_sleeps_is_named_and_not_the_one_that_waits_for_it(launched, tmp_path):
    message = failure(launched, wait_in_a_collective, sleep_for_ever)
    lines = message.splitlines()
    assert re.fullmatch(r"rank 1 hangs: it has not ended step 4 for \d+ s", lines[0])
    assert lines[1].startswith("  rank 1 in step 4, at tests/unit/launch/test_hang.py:")
    assert lines[1].endswith(" in sleep_for_ever: time.sleep(60)")
    assert "  rank 0 in step 4, waiting for init_process_group called at " in message
    assert f"{tmp_path}/run/logs/rank-1.log" in message
    assert "in sleep_for_ever" in (tmp_path / "run" / "logs" / "rank-1.log").read_text()


def test_a_rank_that_is_stopped_between_two_steps_is_named(launched, monkeypatch):
    """As right after its last line of the ledger, or after a manifest: no step is late then."""

    def stop_after_a_step() -> None:
        sign(Phase.BETWEEN)
        os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(hang, "ANSWER", 0.5)
    limits = Limits(60.0, 60.0, 60.0, stopped=0.4)
    message = failure(launched, wait_in_a_collective, stop_after_a_step, deaf_rank, limits=limits)
    assert message.startswith("rank 1 hangs: it has ended step 4 and has not begun another for ")
    assert "  rank 1 after step 4, stopped by a signal (SIGSTOP), so it cannot say where" in message
    assert "  rank 2 in step 4, it does not say where" in message


def test_a_rank_that_dies_without_a_word_has_failed(launched, monkeypatch):
    """Its status says that all is well, and those that wait for it would wait for ever."""
    monkeypatch.setattr(ranks, "GRACE", 0.2)
    assert "rank 0 ended with status 0 without a word" in failure(launched, lambda: os._exit(0), sleep_for_ever)


def test_a_rank_that_returns_or_that_bridge_ends_has_not(launched):
    """Whatever function a logger has put in the place of sys.exit."""

    def leave() -> None:
        assert rank.leaving([]).make(lambda state: True)(None)
        sys.exit(0)

    assert launched(lambda: None, leave) is ranks.Outcome.COMPLETED
    assert "failed: SystemExit: 0" in failure(launched, lambda: sys.exit(0))


class _NoTextError(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


def _blocked_cleanup() -> None:
    """As Bridge's, which aborts process groups that wait for a GPU."""
    try:
        raise MemoryError("the true reason")
    except MemoryError:
        rank.FAILING_FIRST.make(sleep_for_ever)()


def _blocked_close() -> None:
    with rank.closing([SimpleNamespace(close=sleep_for_ever)]):
        raise ValueError("the true reason")


def _second_error() -> None:
    """A clean-up that fails of what came before: the first error is the reason."""
    with pytest.raises(ValueError), rank.closing([]):
        raise ValueError("the true reason")
    raise RuntimeError("of the clean-up")


def _no_text() -> None:
    raise _NoTextError


def _no_thread() -> None:
    """As under `ulimit -v`."""

    def dump_traceback_later(*_, **__) -> None:
        raise RuntimeError("unable to start watchdog thread")

    rank.faulthandler.dump_traceback_later = dump_traceback_later  # of this process alone, which ends
    raise ValueError("the true reason")


def _fails() -> None:
    raise ValueError("the true reason")


def test_ranks_that_hang_because_another_has_failed_are_no_reason(launched, monkeypatch):
    monkeypatch.setattr(ranks, "GRACE", 1.0)  # longer than a step may take
    assert failure(launched, _fails, sleep_for_ever).startswith("rank 0 failed: ValueError: the true reason")


def _left_thread() -> None:
    threading.Thread(target=sleep_for_ever).start()


def _left_process() -> None:
    multiprocessing.get_context("fork").Process(target=sleep_for_ever, name="left").start()


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "function, said",
    (
        (_blocked_cleanup, "rank 0 failed: MemoryError: the true reason"),
        (_blocked_close, "rank 0 failed: ValueError: the true reason"),
        (_second_error, "rank 0 failed: ValueError: the true reason"),
        (_no_thread, "rank 0 failed: ValueError: the true reason"),
        (_no_text, "rank 0 failed: _NoTextError: its text cannot be made: str() of it raises KeyError"),
    ),
)
def test_a_rank_says_why_it_fails_before_anything_cleans_up(launched, monkeypatch, function, said):
    monkeypatch.setattr(rank, "LAST_SECONDS", 0.3)
    monkeypatch.setattr(ranks, "GRACE", 0.2)
    assert failure(launched, function, wait_in_a_collective, limits=None).startswith(said)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("function", (_left_thread, _left_process))
def test_a_rank_that_is_done_ends_whatever_it_has_left(launched, monkeypatch, tmp_path, function):
    monkeypatch.setattr(rank, "LAST_SECONDS", 0.3)
    assert launched(function, limits=None) is ranks.Outcome.COMPLETED
    assert "alive 0 s after the end of this rank, and killed" in (tmp_path / "run/logs/rank-0.log").read_text()


def test_what_a_rank_has_left_gets_time_to_end(launched, tmp_path):
    def write_later() -> None:
        time.sleep(0.3)
        (tmp_path / "late").touch()

    assert launched(lambda: threading.Thread(target=write_later).start()) is ranks.Outcome.COMPLETED
    assert (tmp_path / "late").exists()


def test_a_slow_run_goes_on(launched):
    """Steps that take longer than the limit together, and a checkpoint that does so alone."""

    def slow() -> None:
        for step in (4, 5, 6):
            sign(Phase.STEP, step)
            time.sleep(0.25)
            sign(Phase.BETWEEN)
        time.sleep(0.7)

    assert launched(slow, limits=Limits(step=0.6, long_step=60.0, alone=60.0)) is ranks.Outcome.COMPLETED


class _EnoughSeenError(Exception):
    pass


def after(seconds: float, error: type[Exception]) -> Callable[[], None]:
    began = time.monotonic()

    def tick() -> None:
        if time.monotonic() - began > seconds:
            raise error

    return tick


def test_without_a_limit_nothing_is_reported(launched, tmp_path):
    """The same rank, for longer than the limit of the tests above."""
    with pytest.raises(_EnoughSeenError):
        launched(sleep_for_ever, limits=None, tick=after(0.8, _EnoughSeenError))
    assert (tmp_path / "run" / "logs" / "rank-0.log").read_text() == ""


def test_ranks_say_where_they_stand_when_those_of_another_machine_hang(launched):
    with pytest.raises(ranks.RankFailed) as error:
        launched(wait_in_a_collective, limits=None, tick=after(0.4, ranks.PeersHang))
    assert [(rank_state.rank, rank_state.standing) for rank_state in error.value.failure.rank_states] == [(0, "waits")]


# What follows looks at no process.


class Launcher:
    """Two ranks' signs of life, and the clock of the launcher, which looks at them ten times a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limits: Limits | None) -> None:
        self.now, self.signs = 1000.0, [Sign(0, Phase.STARTING, 0, 0)] * 2
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.watch = HangWatch(self.signs, (0, 1), limits)

    def give(self, phase: Phase, step: int = 0) -> None:
        self.signs[:] = [Sign(sign.count + 1, phase, step, 0) for sign in self.signs]

    def overdue(self, seconds: float, state: str = "S", step: float = 0.5) -> bool:
        """Whether a rank is overdue while time passes. state: of the last rank's process."""
        overdue = False
        for _ in range(round(seconds / step)):
            self.now += step
            overdue |= self.watch.overdue(["S", state])
        return overdue


AUTO, SHORT_STEPS = Limits(step=None, long_step=540.0, alone=1800.0), Limits(5.0, 540.0, 1800.0)
LONG, STEP, BETWEEN, SETTING_UP = Phase.LONG_STEP, Phase.STEP, Phase.BETWEEN, Phase.SETTING_UP
STOPPED = (55, "T"), (1, "S"), (1, "T")  # and continued
# What ranks give or for how long they give nothing, as seconds and the state of a process; at the end one is overdue.
OVERDUE = {
    "the limit follows the steps of the run": (
        AUTO, LONG, (300,), BETWEEN, (1,), LONG, (50,), BETWEEN, (1,), STEP, (40,), BETWEEN, (1,), STEP, (40,), BETWEEN,
        (1,), STEP, (249,), (3,),
    ),
    "a checkpoint may take longer than a step": (Limits(1.0, 540.0, 1800.0), STEP, BETWEEN, (1799,), (3,)),
    **{
        f"one that is stopped has a minute, in {phase}": (AUTO, phase, (50,), *STOPPED, phase, (55, "T"), (8, "T"))
        for phase in (SETTING_UP, LONG, STEP, BETWEEN)
    },
    "one in a system call keeps the limit of its phase": (AUTO, BETWEEN, (1799, "D"), (3, "D")),
    "so does one that is traced": (AUTO, BETWEEN, (1799, "t"), (3, "t")),
    "time in which the launcher was stopped, too": (SHORT_STEPS, STEP, (1,), (3600, "S", 3600), (2,), (3,)),
}  # fmt: skip


@pytest.mark.parametrize("scene", OVERDUE)
def test_when_a_rank_is_overdue(monkeypatch, scene):
    limits, *events = OVERDUE[scene]
    launcher, results = Launcher(monkeypatch, limits), []
    for step, event in enumerate(events):
        if isinstance(event, Phase):
            launcher.give(event, step)
        else:
            results.append(launcher.overdue(*event))
    assert results == [False] * (len(results) - 1) + [True]


@pytest.mark.parametrize("start", (0, 7))
@pytest.mark.parametrize("seen", (Phase.LOADING, Phase.READY, LONG), ids=str)
def test_a_step_of_an_earlier_restart_is_none_of_this_one(monkeypatch, start, seen):
    """seen: the last phase before the end of the first step at which the launcher looks."""
    launcher = Launcher(monkeypatch, AUTO)
    for phase in (Phase.LOADING, Phase.READY, LONG, BETWEEN):
        launcher.give(phase, start + (phase in (LONG, BETWEEN)))
        if phase is BETWEEN or phase <= seen:
            launcher.overdue(0.5)
            assert any(launcher.watch.stepped) is (phase is BETWEEN and seen is not Phase.LOADING)


def test_without_limits_no_stopped_rank_is_overdue(monkeypatch):
    launcher = Launcher(monkeypatch, None)
    launcher.give(BETWEEN)
    assert not launcher.overdue(1799, "T")


def test_process_groups_take_no_half_an_hour_and_the_set_up_around_them_may(monkeypatch):
    launcher = Launcher(monkeypatch, AUTO)
    monkeypatch.setattr(rank.heartbeat, "sign", launcher.give)
    assert rank.JOINING.make(lambda: launcher.overdue(539) or launcher.overdue(3))()
    assert not launcher.overdue(1799)


@pytest.mark.parametrize(
    "longest, limit", ((0.1, 120), (30, 150), (100, 500), (200, 540), (400, 800), (None, 540)), ids=str
)
def test_the_limit_stays_below_that_of_collectives_where_it_can(longest, limit):
    assert AUTO.of_step(longest) == limit


def config(*overrides: str, **sections: dict) -> RunConfig:
    tree = compose("qwen3_toy", ["cuda_graph=off", *overrides], device="gpu").config.sections
    return RunConfig(tree | {name: tree.get(name, {}) | values for name, values in sections.items()})


def test_the_key():
    assert limits(config()) == limits(config("run.hang_timeout=auto")) == Limits(None, 540.0, 1800.0)
    assert limits(config("run.hang_timeout=30")) == Limits(30, 30, 30, 30)
    assert limits(config("run.hang_timeout=2000")) == Limits(2000, 2000, 2000, 2000)
    assert limits(config("run.hang_timeout=off")) is None
    assert limits(config(dist={"distributed_timeout_minutes": 60})) == Limits(None, 3240.0, 3240.0)


def test_steps_that_take_long():
    def graphs(warmup: int) -> dict:
        return {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": warmup}

    for settings, start, long in (
        (config(), 0, {1, 2}),
        (config(), 7, {8, 9}),
        (config("ledger.trace=5:6"), 0, {1, 2, 5, 6}),
        (config(model=graphs(4)), 0, {1, 2, 4, 5, 6}),
        (config(model=graphs(1_000_000)), 0, {1, 2}),
    ):
        assert {step for step in range(start + 1, 12) if takes_long(settings, step, start)} == long


def stand(rank: int, count: int, standing: str, place: str = "in step 4") -> RankState:
    return RankState(rank, count, place, "has not ended step 4", 90.0, standing, (f"{standing} there",))


# Ranks that hang -> those that are to blame: who is behind, though it waits, as where a GPU never ends; who is stopped,
# wherever; of those that are equally far who does not wait.
BLAMED = (
    ([stand(0, 9, "waits"), stand(1, 8, "waits", "in step 3"), stand(2, 9, "busy")], [1]),
    ([stand(0, 8, "waits", "in step 3"), stand(1, 9, "stopped", "after step 3")], [1]),
    ([stand(0, 9, "waits"), stand(1, 9, "busy"), stand(2, 9, "silent")], [1, 2]),
)


@pytest.mark.parametrize("rank_states, ranks", BLAMED)
def test_those_to_blame_are_named(rank_states, ranks):
    assert [suspect.rank for suspect in suspects(rank_states)] == ranks


def test_where_all_wait_no_one_is_blamed():
    words = "all ranks hang: ranks 0 and 1, each waits: they have not ended step 4 for 90 s"
    assert message([stand(0, 9, "waits"), stand(1, 9, "waits")]).splitlines()[0] == words


def test_the_message_of_many_ranks_is_short():
    rank_states = [stand(n, 9, "busy" if n == 7 else "waits") for n in range(512)]
    assert message(rank_states).splitlines() == [
        "rank 7 hangs: it has not ended step 4 for 90 s",
        "  rank 7 in step 4, busy there",
        "  ranks 0, 1, 2, 3, 4, 5, 6, 8, … (511 in all) in step 4, waits there",
    ]


DUMP = """Thread 0x00007f01 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 3 in all_gather
  File "/x/torch/autograd/function.py", line 2 in apply

Current thread 0x00007f02 (most recent call first):
{}
  File "/x/site-packages/megatron/core/tensor_parallel/mappings.py", line 30 in _reduce
"""
LOGGER, FUNCTIONAL = (f"torch/distributed/{name}.py" for name in ("c10d_logger", "_functional_collectives"))


@pytest.mark.parametrize(
    "frames, waits",
    (
        ((("torch/distributed/distributed_c10d.py", "all_reduce"), (LOGGER, "wrapper")), "all_reduce"),
        ((("torch/_ops.py", "__call__"), (FUNCTIONAL, "wait_tensor")), "wait_tensor"),
        ((("torch/autograd/graph.py", "_engine_run_backward"),), "all_gather"),
        ((("torch/distributed/checkpoint/filesystem.py", "write"),), None),
        ((("mine.py", "read"), ("torch/distributed/distributed_c10d.py", "all_gather_object")), None),
        ((), None),
    ),
)
def test_what_a_rank_waits_for(frames, waits):
    lines = "\n".join(f'  File "/x/{file}", line 7 in {function}' for file, function in frames)
    stack = hang.parse("of an earlier time\n" + DUMP.format(lines), 0x7F02)
    assert stack is not None
    assert (stack.waits is None) == (waits is None)
    assert waits is None or stack.waits.startswith(waits)
    assert waits != "all_reduce" or stack.waits.endswith(" megatron/core/tensor_parallel/mappings.py:30 in _reduce")


@pytest.mark.parametrize("line, waits", (("loss.item()", True), ("handle.wait()", True), ("time.sleep(9)", False)))
def test_a_line_that_waits_for_a_gpu(tmp_path, line, waits):
    (tmp_path / "mine.py").write_text(f"{line}\n")
    stack = hang.Stack((hang.Frame(str(tmp_path / "mine.py"), 1, "f"),))
    assert (stack.waits is not None) == waits
