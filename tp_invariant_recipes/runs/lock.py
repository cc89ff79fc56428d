# SPDX-License-Identifier: Apache-2.0
"""The lock of a run directory: one launcher at a time writes there.

    with locked(run_dir):
        …                    RunError: "RUN is being trained by pid N on HOST since …", before anything is written

The lock is `write.lock`. Its holder keeps flock(2) on the open file, and writes there who it is and, every HEARTBEAT
seconds, that it lives. Ranks inherit the open file, so the kernel releases the lock when the last of them has ended
too, however the launcher ended. Nobody deletes the file: two processes could then lock two files of one name.

flock works on local disks, on NFS, and on Lustre mounted with `flock`. On other file systems it fails, or reaches only
the processes of one host; there the pid and the heartbeat decide. So the next launcher takes a lock if

    flock is free and the holder ran on one node, this one, and its process has ended;
    or flock is free and the holder was an earlier try of this SLURM job;
    or flock is free and the last heartbeat is STALE seconds old, and stays the last one while we watch.

An earlier try of this SLURM job that still runs is asked to leave: it finds another's name in the file.

Why not a library: filelock closes the file in forked children, and neither it nor portalocker knows about holders on
other hosts; what remains of them here is one call of fcntl.flock.
"""

import errno
import fcntl
import json
import operator
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import reduction
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from tp_invariant_recipes.errors import RunError, TpiError
from tp_invariant_recipes.reading import Bounds, Count, Record, checked, parse_json
from tp_invariant_recipes.runs.run_dir import RunDir, cannot_write

HEARTBEAT = 5.0  # seconds between two heartbeats
STALE = 120.0  # seconds; NFS may show other hosts an old state of a file for 60
WATCH = 3 * HEARTBEAT  # seconds to watch an old heartbeat: the clocks of two hosts may differ
LEAVING = 60.0  # seconds that the ranks of a dead launcher, or an earlier try of this job, get to end
POLL = 0.1
SIZE = 4096  # bytes of the file at most

# What flock says where a file system has no locks.
UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class LockLost(TpiError):
    """Another launcher has taken the run over: this one ends, and writes nothing more there."""


@dataclass(frozen=True)
class Holder(Record):
    """The contents of `write.lock`.

    boot, pids: of the kernel and of its namespace of process ids. started: of the process, in the kernel's clock ticks.
    inode: of the file; a copy of it has another. since, heartbeat: seconds since 1970. nodes: that the run has.
    job, restart: of SLURM.
    """

    host: str
    boot: str
    pids: Count
    pid: Annotated[int, Bounds(ge=1, lt=2**31)]
    started: Count
    inode: Count
    since: Annotated[float, Bounds(ge=0, lt=1e11)]
    heartbeat: Annotated[float, Bounds(ge=0, lt=1e11)]
    nodes: Count
    job: str | None
    restart: Count


@dataclass(eq=False)
class Lock:
    """A lock that this process holds. remark: whose stale lock it was; None: nobody's."""

    run_dir: RunDir
    descriptor: int
    me: Holder
    remark: str | None = None
    lost: Holder | None = None
    released: threading.Event = field(default_factory=threading.Event)

    def beat(self) -> None:
        """Write a heartbeat every HEARTBEAT seconds, until the lock is released or somebody else's."""
        while not self.released.wait(HEARTBEAT):
            with suppress(OSError):  # a full disk or a server that is away: the next one may succeed
                there = _read(self.descriptor)
                if there is not None and not _same(there, self.me):
                    self.lost = there
                    return
                _write(self.descriptor, replace(self.me, heartbeat=time.time()))

    def check(self) -> None:
        """Raise LockLost."""
        if self.lost is not None:
            raise LockLost(
                f"{self.run_dir.path} was taken over by {_who(self.lost)}: this process ends and leaves the run to it"
            )


_held: dict[Path, Lock] = {}  # of this process, by the real path of the directory


@contextmanager
def locked(run_dir: RunDir, *, nodes: int = 1) -> Iterator[Lock]:
    """Hold the lock of a run directory, which is made if it is not there. A process may do this again inside the block.

    nodes: of the run that will be trained. Raises RunError when another process holds the lock.
    """
    path = run_dir.path.resolve()
    if path in _held:
        yield _held[path]
        return
    lock = _held[path] = _acquire(run_dir, nodes)
    beating = threading.Thread(target=lock.beat, name="write.lock", daemon=True)
    beating.start()
    try:
        yield lock
    finally:
        lock.released.set()
        beating.join()
        del _held[path]
        with suppress(OSError):
            if _same(_read(lock.descriptor), lock.me):
                os.ftruncate(lock.descriptor, 0)
        os.close(lock.descriptor)  # not unlocked: a rank that is still dying keeps the lock


@contextmanager
def locked_empty(run_dir: RunDir) -> Iterator[Lock]:
    """Lock a directory that a command planned to fill. RunError: another has written there since."""
    with locked(run_dir) as lock:
        if not run_dir.is_empty():
            raise RunError(f"{run_dir.path} is not empty any more: another command has begun there; choose another")
        yield lock


def holder(run_dir: RunDir) -> Holder | None:
    """Who trains in a run directory, as far as its lock's file tells; None: nobody. It takes no lock."""
    try:
        descriptor = os.open(run_dir.lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        there, inode = _read(descriptor), os.fstat(descriptor).st_ino
        if there is None or there.inode != inode:  # a copy of the directory copies the file
            return None
        if _here(there, _me(inode, 1)):
            return there if _started(there.pid) == there.started else None
        return there if abs(time.time() - there.heartbeat) <= STALE else None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def check() -> None:
    """Raise LockLost when another launcher has taken over a directory whose lock this process held."""
    for lock in _held.values():
        lock.check()


class Inherited:
    """The locks of this process, for a rank: it holds them too, forked or spawned, until it ends."""

    def __init__(self) -> None:
        self.descriptors = [lock.descriptor for lock in _held.values()]

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, tuple(reduction.DupFd(descriptor) for descriptor in self.descriptors)


def _received(*sent: Any) -> Inherited:
    inherited = Inherited()
    inherited.descriptors = [part.detach() for part in sent]
    for descriptor in inherited.descriptors:
        os.set_inheritable(descriptor, False)
    return inherited


def _acquire(run_dir: RunDir, nodes: int) -> Lock:
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:  # its target would be overwritten
            raise RunError(f"{run_dir.lock} is a symbolic link, which tpi does not follow: remove it") from error
        raise RunError(cannot_write(run_dir.lock, error)) from error
    try:
        me = _me(os.fstat(descriptor).st_ino, nodes)
        before = _wait_until_free(run_dir, descriptor, me)
        _write(descriptor, me)
    except OSError as error:
        os.close(descriptor)
        raise RunError(cannot_write(run_dir.lock, error)) from error
    except BaseException:
        os.close(descriptor)
        raise
    remark = None
    if before is not None:
        remark = f"{run_dir.path} was being trained by {_who(before)}, which has ended without a word: taken over"
    return Lock(run_dir, descriptor, me, remark)


def _wait_until_free(run_dir: RunDir, descriptor: int, me: Holder) -> Holder | None:
    """Take the lock. Returns the holder that left without releasing it; None: there was none. Raises RunError."""
    began, claimed, taken = time.monotonic(), None, False
    while True:
        taken = taken or _flock(descriptor)
        there = _read(descriptor)
        if claimed is not None and _same(there, me):
            there = claimed
        if taken and there is None:
            return None
        verdict = _judge(there, me, free=taken)
        if verdict.stale and time.monotonic() - began >= verdict.wait:
            return there
        if not verdict.stale and (not verdict.wait or time.monotonic() - began > verdict.wait):
            if claimed is not None:
                _write(descriptor, claimed)
            raise RunError(_refusal(run_dir, there, verdict.why))
        if verdict.claim:
            claimed = there
            _write(descriptor, me)
        time.sleep(POLL)


class _Verdict(NamedTuple):
    """What to do about a holder.

    stale: take the lock, when it has been so for `wait` seconds. Otherwise refuse, when it has been so that long.
    claim: ask the holder to leave. why: more to say in a refusal.
    """

    stale: bool
    wait: float = 0.0
    claim: bool = False
    why: str = ""


def _judge(there: Holder | None, me: Holder, *, free: bool) -> _Verdict:
    """free: whether flock was free; it counts as free where there is none."""
    if there is None:  # the holder is about to write its name, or has ended and its ranks are about to
        return _Verdict(False, LEAVING)
    requeued = there.job is not None and there.job == me.job and there.restart < me.restart
    dead = _here(there, me) and _started(there.pid) != there.started
    if not free:
        ending = "; it has ended, but ranks of it still run" if dead else ""
        return _Verdict(False, LEAVING if requeued or dead else 0.0, claim=requeued, why=ending)
    if requeued:
        return _Verdict(True)
    if _here(there, me) and not (dead and there.nodes > 1):
        return _Verdict(dead or there.inode != me.inode)
    age = time.time() - there.heartbeat
    if age > STALE:
        return _Verdict(True, WATCH)
    if age < -HEARTBEAT:
        ahead = f"; its last heartbeat is {-age:.0f} s in the future: the clocks of {there.host} and {me.host} differ"
        return _Verdict(False, why=f"{ahead}; if no process trains there, remove write.lock")
    return _Verdict(False, why=f"; its last heartbeat was {max(age, 0):.0f} s ago, and {STALE:.0f} s count as dead")


def _here(there: Holder, me: Holder) -> bool:
    return (there.boot, there.pids) == (me.boot, me.pids)


def _refusal(run_dir: RunDir, there: Holder | None, why: str) -> str:
    if there is None:
        return f"{run_dir.path} is being trained: another process holds {run_dir.lock}"
    return f"{run_dir.path} is being trained by {_who(there)}{why}"


def _who(holder: Holder) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
    job = f" (SLURM job {holder.job})" if holder.job else ""
    return f"pid {holder.pid} on {holder.host} since {since}{job}"


def _me(inode: int, nodes: int) -> Holder:
    now = time.time()
    return Holder(
        host=os.uname().nodename,
        boot=Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
        pids=os.stat("/proc/self/ns/pid").st_ino,
        pid=os.getpid(),
        started=_started(os.getpid()) or 0,
        inode=inode,
        since=now,
        heartbeat=now,
        nodes=nodes,
        job=os.environ.get("SLURM_JOB_ID"),
        restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
    )


def _same(a: Holder | None, b: Holder) -> bool:
    """Whether two are one process."""
    identity = operator.attrgetter("boot", "pids", "pid", "started", "since")
    return a is not None and identity(a) == identity(b)


def process_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on (proc(5)); none where the process has gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []


def _started(pid: int) -> int | None:
    """When a process started, in clock ticks since the kernel did (proc(5), starttime). None: it has ended."""
    fields = process_stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def _flock(descriptor: int) -> bool:
    """Take the kernel's lock. False: another process has it. True also where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    return True


def _read(descriptor: int) -> Holder | None:
    """Return the holder that the file names; None: nobody, or it is being written."""
    try:
        data = os.pread(descriptor, SIZE, 0)
        return checked(Holder, parse_json(data))
    except ValueError:
        return None


def _write(descriptor: int, holder: Holder) -> None:
    """Name the holder, in place: NFS would show other hosts a renamed file late. Raises OSError."""
    data = json.dumps(holder.as_json()).encode() + b"\n"
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))
