"""Atomic files: whole or absent after SIGKILL or a power cut, on a full disk, with two writers."""

import fcntl
import hashlib
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from tp_invariant_recipes.errors import DataError
from tp_invariant_recipes.files import DISK_FULL, sync_folder
from tp_invariant_recipes.start.quiet import quiet

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def beside(prefix: Path, suffix: str) -> Path:
    """PREFIX with a suffix appended; unlike with_suffix, it keeps the dots in the name."""
    return prefix.with_name(prefix.name + suffix)


def sha256_of_file(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def indexed(prefix: Path, vocab_size: int) -> Iterator["IndexedDatasetBuilder"]:
    """Return a builder of PREFIX.bin. On exit it writes PREFIX.idx too and syncs both to disk.

    On error it removes both. The index has the smallest type that Megatron uses for `vocab_size` ids.
    """
    megatron = _indexed_dataset()
    data, index = beside(prefix, ".bin"), beside(prefix, ".idx")
    builder = megatron.IndexedDatasetBuilder(str(data), dtype=megatron.DType.optimal_dtype(vocab_size))
    try:
        with warnings.catch_warnings():
            # Megatron's reader asks for the rank before it logs, and warns that there is none.
            warnings.filterwarnings("ignore", message="Could not determine rank")
            yield builder
        builder.finalize(str(index))
        _sync(data)
        _sync(index)
    except BaseException:
        with suppress(OSError):  # the buffered rest does not fit either, and the file is removed anyway
            builder.data_file.close()
        data.unlink(missing_ok=True)
        index.unlink(missing_ok=True)
        raise


def publish_index(built: Path, prefix: Path, metadata: str | None = None) -> None:
    """Rename a finished pair into place: .bin, then .json if given, then .idx, which makes the dataset valid.

    Each step is synced before the next, so a power cut leaves the first steps of this sequence and nothing else.
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
        sync_folder(prefix.parent)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for an exclusive lock, hold it, and remove its file afterwards.

    A killed process leaves its file without a lock, which blocks nobody.
    """
    while True:
        with path.open("a") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            # The last holder may have removed this file. A lock on a removed file excludes nobody: start over.
            if not _is_at(stream.fileno(), path):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


@contextmanager
def write_errors(prefix: Path, kept: Path) -> Iterator[None]:
    """Turn OSError into DataError. On a full disk the message says how much is free. kept: folder of finished parts."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise DataError(f"cannot write {prefix}: {error}") from error
        folder = next(folder for folder in prefix.absolute().parents if folder.exists())
        free = shutil.disk_usage(folder).free
        raise DataError(
            f"the disk is full: could not write {prefix}.bin and .idx; {free / 2**20:.1f} MiB are free in "
            f"{folder} after removing the unfinished files. {kept} keeps the finished parts: "
            "make room and run again to continue, or remove that folder and choose another --output"
        ) from error


@cache
def _indexed_dataset() -> ModuleType:
    """Megatron's module, imported on first use: the import takes seconds, and its dependencies print a lot."""
    with quiet():
        return import_module("megatron.core.datasets.indexed_dataset")


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one at this path. Another process may remove or replace it between two calls."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _sync(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
