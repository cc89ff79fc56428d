"""Writing a file or a folder whole or not at all: the only place that writes beside a file and renames."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # of an OSError
UNFINISHED = ".new"  # how the names of files end that a killed process was writing


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
        for file in temporary.iterdir():
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
