# SPDX-License-Identifier: Apache-2.0
"""Starts ranks as processes of this machine, watches them until all have ended, and reports why one failed.

Ranks are started as torchrun starts functions, through torch.multiprocessing. On a CPU they are forked from this
process, which has imported Megatron-Bridge already: one import of some seconds for all ranks instead of one each. So
are GPU ranks where `start/forking.py` proves that a fork of this process can use CUDA; elsewhere, and with
TPI_FORK_GPU_RANKS=0, they are spawned.
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tp_invariant_recipes.errors import HardwareFault, RunError
from tp_invariant_recipes.files import DISK_FULL, TOO_MANY_FILES, free_bytes, no_inodes, shortage, too_many_files
from tp_invariant_recipes.launch import hang
from tp_invariant_recipes.launch.hang import HangWatch, RankState, message, suspects
from tp_invariant_recipes.ledger.run_files import LARGEST, Reason
from tp_invariant_recipes.reading import Listed, Record, Seconds, checked, parse_json, read_limited
from tp_invariant_recipes.runs import lock
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.start import bridge
from tp_invariant_recipes.start.forking import can_fork
from tp_invariant_recipes.text import first_line
from tp_invariant_recipes.training.heartbeat import Heartbeats, Limits, Phase

if TYPE_CHECKING:
    from tp_invariant_recipes.training.rank import RankInfo

FORK = "TPI_FORK_GPU_RANKS"  # environment variable
GRACE = 5.0  # seconds that the other ranks get to say why they failed, after the first has
PATIENCE = 3.0  # seconds that ranks get to answer a request to stop before they have made a step
POLL = 0.1  # seconds between looks at the ranks, at most: the end of one is seen at once
FULL = 64 * 1024  # bytes: a disk with less free is what stopped the ranks
REQUEUE = signal.SIGUSR1, signal.SIGUSR2  # that a job is about to end: ours, and submitit's
TAIL = 12  # lines of a dead rank's log to show
LAST = 1 << 16  # bytes of it in which they are looked for

# What a rank does. A function at the top level of a module, since GPU ranks are spawned.
RankFn = Callable[[RunDir, "RankInfo"], None]


class Outcome(Enum):
    """How a run ended, when it did not fail."""

    COMPLETED = "completed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Failure(Record):
    """Why the ranks of a machine have failed, as nodes tell each other.

    cause:  seconds since 1970 of the failure that began it; 0 where nothing but a signal ended the rank.
    user_error: a rank said itself what is wrong with the configuration, and would say so again.
    hardware: it said that a processor has computed corrupted values; on others it would not.
    rank_states: of the ranks that hang, and of those that wait for them.
    node:   in a job of several nodes, where they ran.
    """

    why: str
    cause: Seconds
    user_error: bool = False
    hardware: bool = False
    rank_states: Listed[RankState] = ()
    node: str = ""


class RankFailed(RunError):
    """A rank died, or hangs."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.why)
        self.failure = failure


class PeersHang(Exception):
    """Ranks of another machine hang, or wait for ranks that do. A `tick` raises it to learn where those here stand."""


@dataclass
class Stop:
    """The signals that came, and what they ask for.

    requests:    SIGTERM, SIGHUP or Ctrl-C: once to save and stop, twice to stop now.
    requeue:     SIGUSR1 or SIGUSR2: save and stop, but only to go on in another job; never more than that.
    interrupted: whether one of the requests was Ctrl-C.
    """

    requests: int = 0
    requeue: bool = False
    interrupted: bool = False

    @property
    def signals(self) -> int:
        """How many signals each rank is to get."""
        return self.requests or int(self.requeue)

    @property
    def resumable(self) -> bool:
        """Whether the run is to be resumed in another job: only SIGUSR1 or SIGUSR2 came."""
        return self.requeue and not self.requests


@contextmanager
def stopping() -> Iterator[Stop]:
    """SIGTERM, SIGHUP, Ctrl-C, SIGUSR1 and SIGUSR2 are noted instead of raised, so that ranks can save.

    SIGHUP stays ignored under nohup. A terminal that closes sends it more than once, so it asks once.
    """
    stop = Stop()

    def note(number: int, _: Any) -> None:
        if number in REQUEUE:
            stop.requeue = True
        elif number == signal.SIGHUP:
            stop.requests = max(stop.requests, 1)
        else:
            stop.requests += 1
            stop.interrupted |= number == signal.SIGINT

    numbers = [signal.SIGTERM, signal.SIGINT, *REQUEUE]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interruptible() -> Iterator[Stop]:
    """Treat SIGTERM between two trainings as Ctrl-C, and count it; during one its launcher handles both."""
    stop = Stop()

    def interrupt(*_: Any) -> None:
        stop.requests += 1
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


def run(
    run_dir: RunDir,
    device: str,
    rank_infos: Sequence["RankInfo"],
    tick: Callable[[], None],
    stop: Stop,
    *,
    rank_fn: RankFn,
    started: Callable[[], None] | None = None,
    limits: Limits | None = None,
) -> Outcome:
    """Run these ranks, all of this machine, to their end.

    Raises RankFailed: which one died, its log, its last lines; or which one hangs, and where. Until the ranks have made
    a step there is nothing to save: those that do not answer a request to stop within PATIENCE are killed.

    tick:    called about ten times a second while ranks live; if it raises, they are ended and the error passed on.
    rank_fn: what each rank does, a function of a module.
    started: called once all processes exist, before any of them does anything.
    limits:  seconds that a rank may give no heartbeat; None: it may hang for ever.
    """
    import torch.multiprocessing

    from tp_invariant_recipes.training import rank

    for info in rank_infos:
        run_dir.failure(info.rank).unlink(missing_ok=True)
    method = start_method(device)
    heartbeats = Heartbeats(len(rank_infos), torch.multiprocessing.get_context(method))
    arguments = (str(run_dir.path), rank_infos, rank_fn, heartbeats, lock.Inherited())
    processes = torch.multiprocessing.start_processes(
        rank.main, args=arguments, nprocs=len(rank_infos), join=False, start_method=method
    ).processes
    if started:
        started()
    heartbeats.release_ranks()
    hangs = HangWatch(heartbeats, [info.rank for info in rank_infos], limits)
    logs = [run_dir.rank_log(info.rank) for info in rank_infos]

    def failed(n: int) -> bool:
        """Whether a rank has ended before it was done: with a status, or without a word."""
        code = processes[n].exitcode
        return code is not None and (code != 0 or heartbeats[n].phase is not Phase.DONE)

    def look() -> None:
        """Call `tick`, and raise RankFailed where a rank hangs, or its peers on other nodes do.

        After a failure the others hang because of it, and get GRACE.
        """
        with suppress(PeersHang):
            tick()
            states = [hang.state(p.pid) if p.is_alive() else "" for p in processes]
            if not hangs.overdue(states) or any(map(failed, range(len(processes)))):
                return
        raise hanging(hangs.rank_states(processes, logs), run_dir)

    ended_here = _watch(processes, stop, look, lambda: any(hangs.stepped), failed)
    dead = {rank_infos[n].rank: p.exitcode for n, p in enumerate(processes) if failed(n) and n not in ended_here}
    # Before training begins, SIGTERM just ends a rank.
    if dead and not (stop.signals and all(code == -signal.SIGTERM for code in dead.values())):
        raise _failure(run_dir, dead)
    return Outcome.STOPPED if stop.signals else Outcome.COMPLETED


def start_method(device: str) -> str:
    """How the ranks of a run are started: "fork" or "spawn"."""
    if device == "cpu":
        return "fork"
    return "fork" if os.environ.get(FORK) != "0" and can_fork(bridge.imported_with or None) else "spawn"


def hanging(rank_states: Sequence[RankState], run_dir: RunDir) -> RankFailed:
    """Return the error of a run whose ranks stand like this, on one machine or several."""
    first = (suspects(rank_states) or rank_states)[0].rank
    lines = [
        message(rank_states),
        f"the frames of all threads are at the end of each rank's log: {run_dir.rank_log(first)}",
        "run.hang_timeout=SECONDS gives each step, load and save more time; off: there is no limit",
    ]
    return RankFailed(Failure("\n".join(lines), time.time(), rank_states=tuple(rank_states)))


def _watch(
    processes: Sequence[Any],
    stop: Stop,
    tick: Callable[[], None],
    stepped: Callable[[], bool],
    failed: Callable[[int], bool],
) -> set[int]:
    """Wait for the end of all; pass a stop on to them; end the others soon after one has failed.

    stepped: whether they have made a step. failed: whether the process at an index has.
    Returns the indices of the processes that were killed here: these did not fail by themselves.
    """
    passed_on, asked_at, failed_at, ended_here = 0, None, None, set()
    try:
        while alive := [p.sentinel for p in processes if p.is_alive()]:
            wait(alive, POLL)
            tick()
            if stop.signals > passed_on:
                passed_on = stop.signals
                asked_at = asked_at or time.monotonic()
                if passed_on == 1:
                    _signal(processes, signal.SIGTERM)
                else:
                    ended_here |= _signal(processes, signal.SIGKILL)
            if asked_at and time.monotonic() - asked_at > PATIENCE and not stepped():
                ended_here |= _signal(processes, signal.SIGKILL)
            if failed_at is None and any(map(failed, range(len(processes)))):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > GRACE:
                ended_here |= _signal(processes, signal.SIGKILL)
        tick()
    except BaseException:
        _signal(processes, signal.SIGKILL)
        raise
    return ended_here


def _signal(processes: Sequence[Any], number: int) -> set[int]:
    """Send a signal to the ranks that live, and return their indices."""
    alive = {n: p for n, p in enumerate(processes) if p.is_alive()}
    for process in alive.values():
        os.kill(process.pid, number)
    return set(alive)


def _failure(run_dir: RunDir, dead: dict[int, int]) -> RankFailed:
    """Return the error of a failed run, from the rank that failed first.

    dead: rank -> exit status, negative for a signal. A rank killed from outside leaves no reason and is the cause of
    the others' failures; otherwise a hardware fault is, or the earliest reason.
    """
    reasons = {r: reason for r in dead if (reason := _reason(run_dir.failure(r)))}
    silent = [r for r in dead if r not in reasons]
    hardware = {r for r, reason in reasons.items() if reason.kind == HardwareFault.__name__}
    first = silent[0] if silent else min(hardware or reasons, key=lambda r: reasons[r].time)
    cause = 0.0 if silent else reasons[first].time
    if (lacks := _lacking(run_dir, {r.errno for r in reasons.values()})) is not None:
        return RankFailed(Failure(lacks, cause))
    log = f"its log: {run_dir.rank_log(first)}"
    if silent:
        tail = _tail(run_dir.rank_log(first))
        return RankFailed(Failure("\n".join([f"rank {first} {_exit_text(dead[first])}", log, *tail]), cause))
    reason = reasons[first]
    if not reason.user_error:
        how = f"{reason.kind}: {first_line(reason.message)}"
        return RankFailed(Failure(f"rank {first} failed: {how}\n{log}", cause))
    if first in hardware:  # which names the ranks itself
        return RankFailed(Failure(reason.message, cause, user_error=True, hardware=True))
    return RankFailed(Failure(f"{reason.message}\n(rank {first}; {log})", cause, user_error=True))


def _lacking(run_dir: RunDir, numbers: Collection[int | None]) -> str | None:
    """Return what the machine has run out of; None: nothing. numbers: of the OSErrors that ended ranks."""
    full = next((number for number in numbers if number in DISK_FULL), None)
    if full or free_bytes(run_dir.path) < FULL or no_inodes(run_dir.path):
        lacks = shortage(run_dir.path, full)
        return f"disk full: {lacks}, and the run stopped. Free some or set run.dir=PATH on another disk"
    return too_many_files() if {*numbers} & {*TOO_MANY_FILES} else None


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"ended with status {code} without a word"
    name = signal.Signals(-code).name
    hint = "; the kernel kills this way when memory runs out" if code == -signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def _reason(file: Path) -> Reason | None:
    try:
        return checked(Reason, parse_json(read_limited(file, LARGEST)))
    except (OSError, ValueError):
        return None


def _tail(log: Path) -> list[str]:
    if not log.exists():
        return []
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - LAST))
        lines = stream.read(LAST).decode(errors="replace").splitlines()[-TAIL:]
    return ["its last lines:", *(f"  {line[:160]}" for line in lines)]
