"""SIGKILL at every step, a full disk, two at once: the result is whole and the same, or it is not there."""

import errno
import multiprocessing
import os
import signal
import subprocess
import time

import pytest

from tests.unit.data.indexed_data import SUFFIXES, cheap_garbage_collection, count_parts, files_of  # noqa: F401
from tp_invariant_recipes.data import files, tokenizer
from tp_invariant_recipes.data.prepare import ensure_prepared, prepare
from tp_invariant_recipes.data.prepared import is_prepared, load
from tp_invariant_recipes.errors import DataError

FORK = multiprocessing.get_context("fork")  # a fresh process would spend seconds on importing Megatron


@pytest.fixture
def five_texts(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.txt").write_text(f"document {i} " * (i + 1))
    return folder


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(function, *args) -> int:
    """Exit code of the function in a process of its own; -9 when it was killed."""
    child = FORK.Process(target=function, args=args)
    child.start()
    child.join(60)
    return child.exitcode


def prepare_and_die_at_byte(folder, prefix, byte):
    prepare(folder, prefix, part_bytes=1, progress=lambda done, total: die() if done >= byte else None)


def test_killed_and_continued_without_redoing_finished_parts(tmp_path, five_texts, monkeypatch):
    whole = prepare(five_texts, tmp_path / "whole")
    prefix = tmp_path / "out"
    assert in_child(prepare_and_die_at_byte, five_texts, prefix, 60) == -signal.SIGKILL
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "out.partial").glob("*.idx")}
    assert len(finished) == 3
    assert not list(tmp_path.glob("out.[bij]*"))
    assert not is_prepared(prefix)
    written = count_parts(monkeypatch)
    prepare(five_texts, prefix, part_bytes=1)
    assert len(written) == 2
    assert files_of(prefix) == files_of(whole.prefix)
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out.bin", "out.idx", "out.json"]


def prepare_and_die_at_step(folder, prefix, step):
    """Each wait for the disk and each rename is a step; die right before number `step`."""
    steps = iter(range(10**6))

    def counted(real):
        return lambda *args: die() if next(steps) == step else real(*args)

    os.replace, os.fsync = counted(os.replace), counted(os.fsync)
    prepare(folder, prefix, part_bytes=40)


@pytest.mark.release
def test_killed_at_every_step(tmp_path, five_texts):
    want = files_of(prepare(five_texts, tmp_path / "whole").prefix)
    for step in range(1000):
        prefix = tmp_path / f"out{step}"
        exit_code = in_child(prepare_and_die_at_step, five_texts, prefix, step)
        if prefix.with_name(f"{prefix.name}.idx").exists():
            load(prefix, verify=True)
            assert files_of(prefix) == want
        prepare(five_texts, prefix, part_bytes=40)
        assert files_of(prefix) == want
        assert sorted(p.name for p in tmp_path.glob(f"out{step}.*")) == [f"out{step}{s}" for s in sorted(SUFFIXES)]
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL
    assert step > 20  # it did die on the way


def test_parts_of_other_input_are_discarded_and_make_room_at_once(tmp_path, five_texts):
    prefix = tmp_path / "out"
    in_child(prepare_and_die_at_byte, five_texts, prefix, 60)
    old = set((tmp_path / "out.partial").iterdir())
    for path in five_texts.iterdir():
        path.write_text(path.read_text().upper())
    in_child(prepare_and_die_at_byte, five_texts, prefix, 60)
    new = set((tmp_path / "out.partial").iterdir())
    assert len(old) == len(new) == 6
    assert not old & new
    (five_texts / "3.txt").unlink()
    made = prepare(five_texts, prefix, part_bytes=1)
    assert files_of(prefix) == files_of(prepare(five_texts, tmp_path / "whole").prefix)
    assert made.documents == 4


def test_parts_follow_a_file_that_is_renamed(tmp_path, five_texts, monkeypatch):
    """Parts are known by content, so the file is not tokenized again, and still lands where it belongs."""
    prefix = tmp_path / "out"
    in_child(prepare_and_die_at_byte, five_texts, prefix, 60)
    (five_texts / "0.txt").rename(five_texts / "9.txt")
    written = count_parts(monkeypatch)
    prepare(five_texts, prefix, part_bytes=1)
    assert len(written) == 2
    assert files_of(prefix) == files_of(prepare(five_texts, tmp_path / "whole").prefix)


def test_parts_of_another_tokenizer_are_discarded(tmp_path, five_texts, monkeypatch):
    """Stands for two tokenizers whose index has the same type, so that nothing else would notice."""
    prefix = tmp_path / "out"
    in_child(prepare_and_die_at_byte, five_texts, prefix, 60)
    monkeypatch.setattr(
        "tp_invariant_recipes.data.prepare.identify", lambda name: tokenizer.Identity("other", "0" * 64, None)
    )
    written = count_parts(monkeypatch)
    prepare(five_texts, prefix, part_bytes=1)
    assert len(written) == 5


# A disk of 64 KiB: the first size does not fit at all, the second as parts but not merged.
@pytest.mark.parametrize("document_bytes", (20_000, 3_000))
def test_full_disk(tmp_path, five_texts, document_bytes):
    for path in five_texts.iterdir():
        path.write_text(path.name[0] * document_bytes)
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        with pytest.raises(DataError, match=r"the disk is full: .*out.bin.*\d MiB are free in .*disk.*out.partial"):
            prepare(five_texts, disk / "out", part_bytes=1)
        assert not list(disk.glob("out.[bij]*"))
        assert not list(disk.glob("**/building*"))
        kept = len(list(disk.glob("out.partial/*.idx")))
        assert kept == (5 if document_bytes == 3_000 else 1)
        subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
        prepare(five_texts, disk / "out", part_bytes=1)
        assert files_of(disk / "out") == files_of(prepare(five_texts, tmp_path / "whole").prefix)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("step, code", (*((step, errno.ENOSPC) for step in range(10)), (4, errno.EDQUOT)))
def test_full_disk_at_every_wait_for_it(tmp_path, five_texts, monkeypatch, code, step):
    """As some file systems report it: only when the bytes go out."""
    calls = iter(range(10**6))

    def failing(sync):
        def function(path):
            if next(calls) == step:
                raise OSError(code, os.strerror(code))
            sync(path)

        return function

    with monkeypatch.context() as patch:
        for name in ("_sync", "sync_folder"):
            patch.setattr(files, name, failing(getattr(files, name)))
        with pytest.raises(DataError, match="the disk is full"):
            prepare(five_texts, tmp_path / "out")
    assert not (tmp_path / "out.idx").exists() or load(tmp_path / "out", verify=True)
    if step not in (2, 7, 8):  # those are between renames, where a .idx has no .bin beside it any more
        assert not list((tmp_path / "out.partial").glob("building*"))
    prepare(five_texts, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(prepare(five_texts, tmp_path / "whole").prefix)


def test_other_write_errors_name_the_place(tmp_path, five_texts):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file/out: .*File exists.*file"):
        prepare(five_texts, tmp_path / "file" / "out")


def ensure_and_tell(folder, cache, log, start):
    def progress(done, total):
        time.sleep(0.02)
        with log.open("a") as stream:
            stream.write(f"{os.getpid()}\n")

    start.wait()
    made = ensure_prepared(folder, cache, progress=progress)
    with log.open("a") as stream:
        stream.write(f"made {made.digest}\n")


def test_two_at_once(tmp_path, five_texts, monkeypatch):
    log, start = tmp_path / "log", FORK.Barrier(2)
    children = [
        FORK.Process(target=ensure_and_tell, args=(five_texts, tmp_path / "cache", log, start)) for _ in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0]
    told = log.read_text().splitlines()
    made = [line for line in told if line.startswith("made")]
    assert len(made) == 2
    assert len(set(made)) == 1
    assert len({line for line in told if not line.startswith("made")}) == 1  # one worked, the other waited
    assert len(list((tmp_path / "cache").iterdir())) == 3


def hold(path, inside, log):
    with files.locked(path):
        assert not inside.exists()
        inside.touch()
        time.sleep(0.002)
        inside.unlink()
        log.open("a").write("x")


def test_lock_lets_one_in_although_its_file_is_removed(tmp_path):
    """Where such locks usually leak: a waiter gets the removed file, a newcomer a new one."""
    children = [FORK.Process(target=_hold_often, args=(tmp_path,)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 4
    assert len((tmp_path / "log").read_text()) == 4 * 15
    assert not (tmp_path / "lock").exists()


def test_a_lock_file_that_was_removed_or_replaced_is_not_the_one_held(tmp_path):
    path = tmp_path / "lock"
    with path.open("a") as stream:
        assert files._is_at(stream.fileno(), path)
        path.unlink()
        assert not files._is_at(stream.fileno(), path)
        path.touch()
        assert not files._is_at(stream.fileno(), path)


def _hold_often(folder):
    for _ in range(15):
        hold(folder / "lock", folder / "inside", folder / "log")


def test_lock_of_a_killed_process_holds_nobody_up(tmp_path):
    def take_and_die():
        with files.locked(tmp_path / "lock"):
            die()

    assert in_child(take_and_die) == -signal.SIGKILL
    with files.locked(tmp_path / "lock"):
        pass
