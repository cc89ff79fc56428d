"""Files that are either whole or absent: after SIGKILL, after a power cut, on a full disk, with two writers."""

import errno
import fcntl
import hashlib
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tp_invariant_recipes.errors import DataError

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def beside(prefix: Path, suffix: str) -> Path:
    """PREFIX and suffix in one name; unlike with_suffix it keeps the dots that are in the name."""
    return prefix.with_name(prefix.name + suffix)


def sha256_of_file(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def indexed(prefix: Path, vocab_size: int) -> Iterator["IndexedDatasetBuilder"]:
    """A builder of PREFIX.bin; on leaving, PREFIX.idx is written too and both are on the disk. On error neither stays.

    The index's type is the smallest that Megatron uses for `vocab_size` ids.
    """
    with warnings.catch_warnings(action="ignore"):  # about Apex and Transformer Engine, which nobody needs here
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    data, index = beside(prefix, ".bin"), beside(prefix, ".idx")
    builder = IndexedDatasetBuilder(str(data), dtype=DType.optimal_dtype(vocab_size))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Could not determine rank")  # its reader asks in order to log
            yield builder
        builder.finalize(str(index))
        _sync(data)
        _sync(index)
    except BaseException:
        try:
            builder.data_file.close()
        except OSError:
            pass  # what is still buffered does not fit either, and the file goes anyway
        data.unlink(missing_ok=True)
        index.unlink(missing_ok=True)
        raise


def publish_index(built: Path, prefix: Path, metadata: str | None = None) -> None:
    """Rename a finished pair into place: .bin, then (if given) PREFIX.json, and .idx last, which makes it valid.

    Each step is on the disk before the next, so that a power cut leaves a beginning of this sequence, nothing else.
    """
    if metadata is not None:
        text = beside(built, ".json")
        try:
            text.write_text(metadata, encoding="utf-8")
            _sync(text)
        except OSError:
            for suffix in (".bin", ".idx", ".json"):
                beside(built, suffix).unlink(missing_ok=True)
            raise
    for suffix in (".bin", ".idx") if metadata is None else (".bin", ".json", ".idx"):
        os.replace(beside(built, suffix), beside(prefix, suffix))
        _sync(prefix.parent)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, waiting for it. The file goes afterwards; a lock of a killed process holds nobody up."""
    while True:
        with path.open("a") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            # Who held it before has removed the file: a lock on a removed file keeps nobody out, so start over.
            if not path.exists() or path.stat().st_ino != os.fstat(stream.fileno()).st_ino:
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


@contextmanager
def write_errors(prefix: Path, kept: Path) -> Iterator[None]:
    """Turn OSError into DataError: a full disk says where and how much is free; `kept` holds the finished parts."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise DataError(f"cannot write {prefix}: {error}") from error
        folder = next(folder for folder in prefix.absolute().parents if folder.exists())
        free = shutil.disk_usage(folder).free
        raise DataError(
            f"the disk is full: could not write {prefix}.bin and .idx; {free / 2**20:.1f} MiB are free in {folder} "
            f"without the unfinished files. Finished parts are kept in {kept}: make room and run again to continue, "
            "or remove that folder and choose another --output"
        ) from error


def _sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
