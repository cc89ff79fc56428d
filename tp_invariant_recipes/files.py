# SPDX-License-Identifier: Apache-2.0
"""Writing a file or a folder whole or not at all: the only place that writes beside a file and renames."""

import errno
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)  # of an OSError
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # of an OSError
# Words of libraries that raise an error without a number for a full disk: numpy, safetensors, C++ in torch.
FULL_WORDS = ("Not enough free space to write", "No space left on device", "Disk quota exceeded")
UNFINISHED = ".new"  # how the names of files end that a killed process was writing


def errno_of(error: BaseException | None) -> int | None:
    """Return the number of the OSError that this is, or that caused it: writers of checkpoints wrap a full disk's."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        with suppress(Exception):  # of an exception that has no text
            if any(words in str(error) for words in FULL_WORDS):
                return errno.ENOSPC
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def too_many_files() -> str:
    """Say what to do where no more files can be opened."""
    return f"too many files are open, {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} at most: raise ulimit -n"


def free_bytes(path: Path) -> int:
    """Bytes free on the disk that holds `path` or would hold it."""
    return shutil.disk_usage(_existing(path)).free


def no_inodes(path: Path) -> bool:
    """Whether the disk of `path` can hold no more files, whatever space it has."""
    disk = os.statvfs(_existing(path))
    return bool(disk.f_files) and not disk.f_favail


def shortage(path: Path, number: int | None = errno.ENOSPC) -> str:
    """Say what a disk has run out of. number: of the OSError that said so."""
    if number == errno.EDQUOT:
        return f"the quota of {path} is used up"
    if no_inodes(path):
        return f"no inodes are left for {path} (df -i)"
    return f"{free_bytes(path) / 2**20:.1f} MiB are free for {path}"


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def write_atomically(file: Path, data: str | bytes) -> None:
    """Give a file its contents at once: a crash, a full disk or a power cut leaves the old ones or the new ones.

    data: text is written as UTF-8. The folder is there. Raises OSError, and leaves nothing but the old file then.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}{UNFINISHED}")  # two processes write two
    try:
        with temporary.open("wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(file.parent)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give a folder its files at once: the block fills another beside it, which then takes its name.

    The folder is not there, or empty. An error in the block or OSError leaves it as it was.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}{UNFINISHED}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in filter(Path.is_file, temporary.rglob("*")):
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        sync_folder(temporary)
        os.rename(temporary, folder)  # it replaces an empty folder and no other
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot do this to a folder
            raise
    finally:
        os.close(descriptor)
