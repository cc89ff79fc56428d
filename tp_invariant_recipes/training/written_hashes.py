# SPDX-License-Identifier: Apache-2.0
"""Hashes of the checkpoint files that a rank writes, made of the bytes in memory, so that nothing is read back.

The rank writes them itself, or with `checkpoint.async_save` a process of its own (async_writer.py), which sends it the
hashes through Megatron's queue of results.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from tp_invariant_recipes.observe.union import gathered_by_first
from tp_invariant_recipes.replacement import Replacement, applied
from tp_invariant_recipes.runs.checkpoints import CheckpointFile

AT_ONCE = 1 << 20  # bytes: from here on a second thread hashes while this one writes; neither holds the GIL

_written: dict[str, "_Hashed"] = {}  # by the path of a file that this process has written
_hashes: dict[str, dict[str, Any]] = {}  # by the path of a file of this rank: a CheckpointFile as JSON
_finalized: list[Path] = []  # at most one


class _Hashed:
    """A stream that is only appended to. It hashes what it passes on.

    ended: where its last write has ended; -1: something was written past it, and the file has no hash.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._hash, self.ended = stream, xxhash.xxh3_128(), 0
        self._thread = ThreadPoolExecutor(max_workers=1)  # it starts with the first large write

    def write(self, data: Any) -> int:
        """Write all of the bytes."""
        view = memoryview(data).cast("B")
        if self._stream.tell() != self.ended:
            self.ended = -1
            return self._stream.write(view)
        if view.nbytes < AT_ONCE:
            self._hash.update(view)
            count = self._stream.write(view)
        else:
            hashed = self._thread.submit(self._hash.update, view)
            count = self._stream.write(view)
            hashed.result()
        self.ended += view.nbytes
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def file(self) -> CheckpointFile:
        """Size and hash."""
        return CheckpointFile(self.ended, self._hash.hexdigest())


def _hashing_writes(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)  # Megatron asks for the names of its arguments
    def write_item(*arguments: Any, **options: Any) -> Any:
        # (transforms, stream, …), or (stream, …) of a torch without transforms
        at = next(n for n, argument in enumerate(arguments) if hasattr(argument, "fileno"))
        stream = arguments[at]
        if stream.tell() == 0:
            _written[stream.name] = _Hashed(stream)
        return original(*arguments[:at], _written.get(stream.name, stream), *arguments[at + 1 :], **options)

    return write_item


def _tell(write: Callable[..., None], rank: int, buckets: Any, results: Any) -> None:
    """Write the files, and send the hashes after Megatron's results: another process may have written."""
    write(rank, buckets, results)
    written = {path: hashed for path, *_ in buckets if (hashed := _written.pop(str(path), None)) is not None}
    results.put({str(path): hashed.file.as_json() for path, hashed in written.items() if hashed.ended >= 0})


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_save_function_and_args(writer: Any) -> Any:
        write, copy_to_host, arguments = original(writer)
        if write is None:
            return write, copy_to_host, arguments
        return functools.partial(_tell, write), copy_to_host, arguments

    return get_save_function_and_args


def _told(original: Callable[..., Any]) -> Callable[..., Any]:
    def retrieve_write_results(writer: Any) -> Any:
        results = original(writer)
        _finalized[:] = [Path(writer.checkpoint_dir)]
        if writer.results_queue is not None and isinstance(results, list):
            _hashes.update(writer.results_queue.get_nowait())
        return results

    return retrieve_write_results


def _of_fsdp(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_fsdp_dtensor_checkpoint(checkpoint_path: Any, *arguments: Any, **options: Any) -> Any:
        with applied([Replacement("torch.distributed.checkpoint.filesystem:_write_item", _hashing_writes, _WHY)]):
            result = original(checkpoint_path, *arguments, **options)
        _hashes.update({path: hashed.file.as_json() for path, hashed in _written.items() if hashed.ended >= 0})
        _written.clear()
        _finalized[:] = [Path(checkpoint_path)]
        return result

    return save_fsdp_dtensor_checkpoint


_MODULE = "megatron.core.dist_checkpointing.strategies.filesystem_async"
_WHY = "the first rank alone would read every file of a checkpoint back, while all others wait"
WRITES = Replacement(f"{_MODULE}:_write_item", _hashing_writes, _WHY)
REPLACEMENTS = (
    WRITES,
    Replacement(f"{_MODULE}:FileSystemWriterAsync.get_save_function_and_args", _telling, _WHY),
    Replacement(f"{_MODULE}:FileSystemWriterAsync.retrieve_write_results", _told, _WHY),
    Replacement("megatron.bridge.training.checkpointing:save_fsdp_dtensor_checkpoint", _of_fsdp, _WHY),
)


def finalized() -> Path:
    """Return the folder of the checkpoint that all ranks have written last; saves beside the steps end later."""
    return _finalized[0]


def of_all_ranks(folder: Path) -> dict[str, CheckpointFile]:
    """On the first rank, path in the folder → file, of what all ranks have written below it; elsewhere nothing.

    A collective of the whole world. What a rank has told it forgets.
    """
    mine = [path for path in _hashes if Path(path).is_relative_to(folder)]
    local_files = {str(Path(path).relative_to(folder)): _hashes.pop(path) for path in mine}
    everyone = gathered_by_first(local_files)
    return {name: CheckpointFile(**file) for files in everyone for name, file in files.items()}
