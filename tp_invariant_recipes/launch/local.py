"""Start the ranks of a run on this machine and watch over them until all have ended.

Ranks are started as torchrun starts functions, through torch.multiprocessing. On a CPU they are forked from this
process, which has imported Megatron-Bridge already: one import of 10 to 20 s for all ranks instead of one each.
A process that forks must not have started CUDA, so GPU ranks are spawned.
"""

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.launch.plan import Plan
from tp_invariant_recipes.training.rundir import RunDir, free_bytes

START_METHODS = {"cpu": "fork", "gpu": "spawn"}
GRACE = 5.0  # seconds that the other ranks get to say why they failed, after the first has
POLL = 0.1  # seconds between looks at the ranks
FULL = 64 * 1024  # bytes: a disk with less free is what stopped the ranks
TAIL = 12  # lines of a dead rank's log to show


class Outcome(Enum):
    """How a run ended, when it did not fail."""

    COMPLETED = "completed"
    STOPPED = "stopped"


@dataclass
class _Stop:
    """Set by SIGTERM or Ctrl-C: once to save and stop, twice to stop now."""

    requests: int = 0


def run(
    plan: Plan,
    tick: Callable[[], None],
    *,
    story: Callable[[RunDir, Any], None] | None = None,
    meetings: int = 1,
) -> Outcome:
    """Run all ranks to their end. Raises RunError naming the rank that died, its log and its last words.

    tick:     called about ten times a second while ranks live.
    story:    what each rank does, a function of a module: (run directory, seat). Default: train.
    meetings: how often the ranks form a process group.
    """
    import torch.multiprocessing

    os.environ.update(plan.environment)
    _forget_failures(plan.run_dir)
    stores = [_store() for _ in range(meetings)]
    seats = _seats(plan.layout.world, tuple(store.port for store in stores))
    from tp_invariant_recipes.training import rank

    with _stopping() as stop:
        method = START_METHODS[plan.device]
        all_started = torch.multiprocessing.get_context(method).Event()
        context = torch.multiprocessing.start_processes(
            rank.main,
            args=(str(plan.run_dir.path), seats, story or rank.train, all_started),
            nprocs=plan.layout.world,
            join=False,
            start_method=method,
        )
        all_started.set()
        ended_here = _watch(context.processes, stop, tick)
    dead = {r: p.exitcode for r, p in enumerate(context.processes) if p.exitcode and r not in ended_here}
    if stop.requests and all(code == -signal.SIGTERM for code in dead.values()):
        return Outcome.STOPPED  # before training began, SIGTERM just ends a rank
    if dead:
        raise RunError(_why(plan.run_dir, dead))
    return Outcome.STOPPED if stop.requests else Outcome.COMPLETED


def _watch(processes: list[Any], stop: _Stop, tick: Callable[[], None]) -> set[int]:
    """Wait for the end of all; pass a stop on to them; end the others soon after one has failed.

    Returns the ranks that had to be ended here, which failed of nothing but that.
    """
    passed_on, failed_at, ended_here = 0, None, set()
    while any(p.is_alive() for p in processes):
        time.sleep(POLL)
        tick()
        if stop.requests > passed_on:
            passed_on = stop.requests
            if passed_on == 1:
                _signal(processes, signal.SIGTERM)
            else:
                ended_here |= _signal(processes, signal.SIGKILL)
        if failed_at is None and any(p.exitcode for p in processes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE:
            ended_here |= _signal(processes, signal.SIGKILL)
    tick()
    return ended_here


def _signal(processes: list[Any], number: int) -> set[int]:
    """Send a signal to the ranks that live, and return them."""
    alive = {rank: p for rank, p in enumerate(processes) if p.is_alive()}
    for process in alive.values():
        os.kill(process.pid, number)
    return set(alive)


@contextmanager
def _stopping() -> Iterator[_Stop]:
    """SIGTERM and Ctrl-C are noted instead of raised, so that ranks can save."""
    stop = _Stop()

    def note(*_: Any) -> None:
        stop.requests += 1

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _store() -> Any:
    """Where ranks meet. Held by this process, as torchrun's agent does, so that the port is ours from the start."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _seats(world: int, ports: tuple[int, ...]) -> list[Any]:
    from tp_invariant_recipes.training.rank import Seat

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: ranks share the processor
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # Gloo would look this host's name up, which may not resolve
    return [Seat(r, r, world, world, "127.0.0.1", ports) for r in range(world)]


def _forget_failures(run_dir: RunDir) -> None:
    for file in run_dir.logs.glob("rank-*.error.json"):
        file.unlink()


def _why(run_dir: RunDir, dead: dict[int, int]) -> str:
    """The message for a failed run, from the rank that failed first.

    dead: rank -> exit status, negative for a signal. A rank killed from outside leaves no reason and is the cause of
    the others' failures; otherwise the earliest reason is.
    """
    reasons = {r: reason for r in dead if (reason := _reason(run_dir.failure(r)))}
    silent = [r for r in dead if r not in reasons]
    if free_bytes(run_dir.path) < FULL or any(r["errno"] == errno.ENOSPC for r in reasons.values()):
        return (
            f"the disk of {run_dir.path} is full ({free_bytes(run_dir.path) / 2**20:.1f} MiB free): the run stopped. "
            f"Free some or set run.dir=PATH on another disk"
        )
    first = silent[0] if silent else min(reasons, key=lambda r: reasons[r]["time"])
    log = run_dir.rank_log(first)
    if first in reasons and reasons[first]["ours"]:
        return f"{reasons[first]['message']}\n(rank {first}; its log: {log})"
    words = _words(dead[first]) if first in silent else f"failed: {reasons[first]['kind']}: {reasons[first]['message']}"
    return "\n".join([f"rank {first} {words}", f"its log: {log}", *_tail(log, shown=first in silent)])


def _words(code: int) -> str:
    if code >= 0:
        return f"ended with status {code} without a word"
    name = signal.Signals(-code).name
    hint = "; the kernel kills this way when memory runs out" if code == -signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def _reason(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _tail(log: Path, *, shown: bool) -> list[str]:
    if not shown or not log.exists():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
    return ["its last lines:", *(f"  {line[:160]}" for line in lines)]
