# SPDX-License-Identifier: Apache-2.0
"""One launcher at a time in a run directory: who is refused, and whose lock is stale."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.runs import lock
from tp_invariant_recipes.runs.lock import LockLost, locked, locked_empty
from tp_invariant_recipes.runs.run_dir import RunDir, choose

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def locked_run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(lock, "LEAVING", 0.5)
    monkeypatch.setattr(lock, "WATCH", 0.2)
    monkeypatch.setattr(lock, "POLL", 0.01)


def _hold(run: RunDir, parent) -> None:
    """Take the lock, and tell `parent` when it is held, and why it is lost."""
    try:
        with locked(run):
            parent.send("held")
            while True:
                lock.check()
                time.sleep(0.01)
    except LockLost as error:
        parent.send(str(error))


@pytest.fixture
def messages() -> Iterator[tuple[Connection, Connection]]:
    """What `other` says comes out of the first."""
    first, second = FORK.Pipe()
    with first, second:
        yield first, second


@pytest.fixture
def other(locked_run, messages):
    """Another process that holds the lock."""
    process = FORK.Process(target=_hold, args=(locked_run, messages[1]))
    process.start()
    assert messages[0].recv() == "held"
    yield process
    _kill(process)


def _kill(process) -> None:
    process.kill()
    process.join()


def write_holder(run: RunDir, **changes) -> dict:
    """Write a holder into the lock: this process, but for the changes."""
    run.path.mkdir(exist_ok=True)
    run.lock.touch()
    holder = lock._me(run.lock.stat().st_ino, 1).as_json() | changes
    run.lock.write_text(json.dumps(holder))
    return holder


def refusal(run: RunDir) -> str:
    before = run.lock.read_bytes()
    with pytest.raises(RunError) as error, locked(run):
        pass
    assert run.lock.read_bytes() == before
    return str(error.value)


def test_a_second_process_is_refused_with_the_pid_the_host_and_the_time(locked_run, other):
    since = time.strftime("%Y-%m-%d %H:%M")
    message = refusal(locked_run)
    assert message.startswith(
        f"{locked_run.path} is being trained by pid {other.pid} on {os.uname().nodename} since {since[:13]}"
    )
    assert [file.name for file in locked_run.path.iterdir()] == ["write.lock"]


def test_the_job_is_named_where_there_is_one(locked_run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with locked(locked_run) as held:
        pass
    write_holder(locked_run, job="77", pid=1, started=lock._started(1))
    monkeypatch.delenv("SLURM_JOB_ID")
    assert held.me.job == "77"
    assert refusal(locked_run).endswith("(SLURM job 77)")


def test_a_lock_that_was_released_leaves_no_trace_but_an_empty_file(locked_run):
    with locked(locked_run) as held:
        assert json.loads(locked_run.lock.read_text())["pid"] == os.getpid()
        with locked(RunDir(locked_run.path / ".." / "run")) as repeated:  # one directory, one lock
            assert repeated is held
    assert locked_run.lock.read_bytes() == b""
    with locked(locked_run) as held:
        assert held.remark is None
    assert choose(str(locked_run.path), "qwen3_toy") == locked_run  # still as good as empty


def test_the_lock_of_a_killed_process_is_taken_over_with_a_remark(locked_run, other):
    _kill(other)
    with locked(locked_run) as held:
        assert f"by pid {other.pid} on " in held.remark
        assert held.remark.endswith("which has ended without a word: taken over")
        assert json.loads(locked_run.lock.read_text())["pid"] == os.getpid()


def _linger(ready, inherited) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    time.sleep(60)


@pytest.mark.parametrize("method", ("fork", "spawn"))
def test_a_rank_that_outlives_its_launcher_keeps_the_lock(locked_run, method):
    """As for a launcher killed by SIGKILL, whose ranks are still writing."""
    context = multiprocessing.get_context(method)
    ready = context.Event()
    with locked(locked_run):
        rank = context.Process(target=_linger, args=(ready, lock.Inherited()))
        rank.start()
        assert ready.wait(20)
    # The launcher has gone, and has not released anything.
    write_holder(locked_run, started=1)
    assert refusal(locked_run).endswith("; it has ended, but ranks of it still run")
    _kill(rank)
    with locked(locked_run) as held:
        assert held.remark


def test_a_lock_that_names_nobody_yet_is_waited_for(locked_run, monkeypatch):
    locked_run.path.mkdir()
    descriptor = os.open(locked_run.lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert refusal(locked_run) == f"{locked_run.path} is being trained: another process holds {locked_run.lock}"
    os.close(descriptor)


ELSEWHERE = {"host": "n7", "boot": "another"}


@pytest.mark.parametrize("holder", (ELSEWHERE, {"host": "n7", "pids": 1}), ids=("host", "container"))
def test_a_holder_that_cannot_be_seen_from_here_is_judged_by_its_heartbeat(locked_run, holder):
    now = time.time()
    write_holder(locked_run, **holder, heartbeat=now - 60)
    assert "by pid " in refusal(locked_run)
    assert "on n7 since" in refusal(locked_run)
    assert "; its last heartbeat was 60 s ago, and 120 s count as dead" in refusal(locked_run)
    write_holder(locked_run, **holder, heartbeat=now + 3600)  # its clock is fast: it is not taken for dead
    assert "; its last heartbeat is 3600 s in the future: the clocks of n7 and " in refusal(locked_run)
    assert lock.holder(locked_run) is None  # for those who only ask
    write_holder(locked_run, **holder, heartbeat=now - lock.STALE - 1)
    with locked(locked_run) as held:
        assert "on n7 since" in held.remark


def test_a_holder_with_a_slow_clock_is_seen_to_live(locked_run, monkeypatch):
    old = time.time() - 2 * lock.STALE
    write_holder(locked_run, **ELSEWHERE, heartbeat=old)
    looks = iter(range(10_000))

    def beating(_: float) -> None:
        if next(looks) == 5:
            write_holder(locked_run, **ELSEWHERE, heartbeat=time.time())

    monkeypatch.setattr(lock.time, "sleep", beating)
    with pytest.raises(RunError, match="on n7 since"), locked(locked_run):
        pass


def test_a_run_on_several_nodes_is_not_dead_with_its_first_process(locked_run):
    """Other nodes' ranks end when they miss it, not at once."""
    write_holder(locked_run, started=1, nodes=2)
    assert "its last heartbeat was 0 s ago" in refusal(locked_run)
    write_holder(locked_run, started=1, nodes=2, heartbeat=time.time() - lock.STALE - 1)
    with locked(locked_run):
        pass
    write_holder(locked_run, started=1, nodes=1)
    with locked(locked_run):
        pass


def test_a_later_try_of_the_same_job_takes_over_at_once(locked_run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    write_holder(locked_run, **ELSEWHERE, job="77", restart=0, nodes=2)
    with locked(locked_run, nodes=2) as held:
        assert held.me.restart == 1
    write_holder(locked_run, **ELSEWHERE, job="77", restart=1)
    assert "(SLURM job 77)" in refusal(locked_run)
    write_holder(locked_run, **ELSEWHERE, job="78", restart=0)
    assert "(SLURM job 78)" in refusal(locked_run)


@pytest.fixture
def of_a_job(monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setattr(lock, "HEARTBEAT", 0.05)


@pytest.mark.usefixtures("of_a_job")
def test_an_earlier_try_that_still_runs_is_asked_to_leave(locked_run, other, messages, monkeypatch):
    """SLURM took its node for dead."""
    monkeypatch.setattr(lock, "LEAVING", 30.0)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with locked(locked_run) as held:
        assert messages[0].recv().startswith(f"{locked_run.path} was taken over by pid {os.getpid()} on ")
        assert f"pid {other.pid} on" in held.remark
        assert json.loads(locked_run.lock.read_text())["pid"] == os.getpid()


def test_an_earlier_try_that_does_not_leave_stays_unchanged(locked_run, other, monkeypatch):
    holder = json.loads(locked_run.lock.read_text()) | {"job": "77", "restart": 0}
    locked_run.lock.write_text(json.dumps(holder))
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(RunError, match=r"being trained by pid .* \(SLURM job 77\)"), locked(locked_run):
        pass
    assert json.loads(locked_run.lock.read_text()) == holder


@pytest.fixture
def no_locks(monkeypatch):
    """A file system without locks."""

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)


def test_without_locks_of_the_file_system_the_process_decides(locked_run, other, no_locks):
    assert f"by pid {other.pid} on " in refusal(locked_run)
    _kill(other)
    with locked(locked_run):
        assert "by pid " in refusal_of_another(locked_run)


def refusal_of_another(run: RunDir) -> str:
    """What this process would be told if it were another one."""
    kept, lock._held = lock._held, {}
    try:
        return refusal(run)
    finally:
        lock._held = kept


def test_the_lock_of_a_copied_directory_is_nobodys(locked_run, other, no_locks):
    copy = RunDir(locked_run.path.with_name("copy"))
    copy.path.mkdir()
    copy.lock.write_bytes(locked_run.lock.read_bytes())
    with locked(copy):
        pass


def test_a_holder_notices_that_another_has_taken_over(locked_run, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT", 0.01)
    with locked(locked_run) as held:
        first = json.loads(locked_run.lock.read_text())["heartbeat"]
        while json.loads(locked_run.lock.read_text() or "{}").get("heartbeat", first) == first:
            time.sleep(0.01)
        lock.check()
        while held.lost is None:  # a heartbeat may be written over the first one: the other beats, too
            taken = write_holder(locked_run, **ELSEWHERE, pid=12, since=1.0, heartbeat=2.0)
            time.sleep(0.01)
        with pytest.raises(LockLost, match="was taken over by pid 12 on n7 since"):
            lock.check()
    assert json.loads(locked_run.lock.read_text()) == taken
    lock.check()


@pytest.mark.parametrize("text", ("", "{", "[]", '{"pid": "1"}', "x" * 9000, '{"pid": 1, "host": "n1"}'))
def test_a_lock_file_that_names_nobody_is_free(locked_run, text):
    locked_run.path.mkdir()
    locked_run.lock.write_text(text)
    with locked(locked_run) as held:
        assert held.remark is None


def test_a_directory_that_another_command_has_filled_since_is_refused(locked_run):
    with locked_empty(locked_run):
        (locked_run.path / "matrix.json").touch()
    with (
        pytest.raises(RunError, match="is not empty any more: another command has begun there"),
        locked_empty(locked_run),
    ):
        pass


EXECUTED = {
    "tp_invariant_recipes.jobs.script": (), "tp_invariant_recipes.features.audit.workflow": (None,),
    "tp_invariant_recipes.features.bench": (None,), "tp_invariant_recipes.features.bisect.workflow": (None,),
    "tp_invariant_recipes.features.verify.workflow": (None,),
}  # fmt: skip


@pytest.mark.parametrize("module", EXECUTED)
def test_commands_that_make_several_runs_take_the_lock_of_their_directory(locked_run, other, module, monkeypatch):
    """Before they write, so that a plan of nothing but a directory is enough to be refused, or to be taken."""
    execute, planned = import_module(module).execute, SimpleNamespace(directory=locked_run, resumed=False, rerun=False)
    monkeypatch.setattr(f"{module}._planned", lambda _: (0, []), raising=False)  # of bisect
    with pytest.raises(RunError, match=f"is being trained by pid {other.pid} on "):
        execute(planned, *EXECUTED[module])
    assert [file.name for file in locked_run.path.iterdir()] == ["write.lock"]
    _kill(other)
    with pytest.raises(AttributeError):  # it goes on, and misses the rest of its plan
        execute(planned, *EXECUTED[module])


@pytest.mark.parametrize("dangling", (False, True))
def test_a_link_in_the_place_of_the_lock_is_not_followed(locked_run, tmp_path, dangling):
    """Its target would be overwritten, or made."""
    locked_run.path.mkdir()
    if not dangling:
        (tmp_path / "precious").write_text("text")
    locked_run.lock.symlink_to(tmp_path / "precious")
    message = r"write\.lock is a symbolic link, which tpi does not follow: remove it"
    with pytest.raises(RunError, match=message), locked(locked_run):
        pass
    assert lock.holder(locked_run) is None
    assert (tmp_path / "precious").exists() != dangling
    assert dangling or (tmp_path / "precious").read_text() == "text"


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(RunError, match=r"cannot write .*/file/run/write\.lock: Not a directory"),
        locked(RunDir(tmp_path / "file" / "run")),
    ):
        pass
