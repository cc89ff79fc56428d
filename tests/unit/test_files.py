# SPDX-License-Identifier: Apache-2.0
"""A file is written whole or not at all, and is on the disk before it takes the place of the old one."""

import errno
import os
import signal
from types import SimpleNamespace

import pytest

from tp_invariant_recipes import files
from tp_invariant_recipes.files import sync_folder, write_atomically

OLD, NEW = b"old", b"new"


@pytest.fixture
def file_alone(tmp_path):
    """A file with contents, alone in its folder."""
    path = tmp_path / "file.json"
    path.write_bytes(OLD)
    return path


def fails(error):
    """A function that raises it, whatever it is given."""

    def function(*_):
        raise error

    return function


@pytest.mark.parametrize("data, content", ((NEW, NEW), ("a文\n", "a文\n".encode()), ("", b"")))
def test_bytes_and_text_are_written_and_nothing_stays_beside_them(file_alone, data, content):
    write_atomically(file_alone, data)
    assert file_alone.read_bytes() == content
    assert os.listdir(file_alone.parent) == [file_alone.name]


def test_a_file_need_not_be_there(tmp_path):
    write_atomically(tmp_path / "first", NEW)
    assert (tmp_path / "first").read_bytes() == NEW
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "no folder" / "first", NEW)


def test_a_process_killed_between_write_and_rename_leaves_the_old_file(file_alone):
    child = os.fork()
    if not child:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        write_atomically(file_alone, NEW)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert file_alone.read_bytes() == OLD
    beside = [path for path in file_alone.parent.iterdir() if path != file_alone]
    assert [path.read_bytes() for path in beside] == [NEW]  # it had been written
    write_atomically(file_alone, NEW)
    assert file_alone.read_bytes() == NEW


@pytest.mark.parametrize("call", ("fsync", "replace"))
def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(file_alone, monkeypatch, call):
    monkeypatch.setattr(os, call, fails(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space left") as error:
        write_atomically(file_alone, NEW)
    assert error.value.errno == errno.ENOSPC
    assert file_alone.read_bytes() == OLD
    assert os.listdir(file_alone.parent) == [file_alone.name]


def test_a_file_system_that_cannot_sync_folders_is_no_reason_to_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", fails(OSError(errno.EINVAL, "Invalid argument")))
    sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", fails(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        sync_folder(tmp_path)


def test_a_disk_without_inodes_or_quota_is_not_called_short_of_bytes(tmp_path, monkeypatch):
    where = tmp_path / "not" / "yet"
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20 if path == tmp_path else 0))
    assert files.shortage(where) == f"1.0 MiB are free for {where}"
    assert files.shortage(where, errno.EDQUOT) == f"the quota of {where} is used up"
    monkeypatch.setattr(files.os, "statvfs", lambda path: SimpleNamespace(f_files=9, f_favail=0))
    assert files.shortage(where) == f"no inodes are left for {where} (df -i)"
    monkeypatch.setattr(files.os, "statvfs", lambda path: SimpleNamespace(f_files=0, f_favail=0))  # Btrfs counts none
    assert not files.no_inodes(where)
