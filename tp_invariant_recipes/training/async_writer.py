# SPDX-License-Identifier: Apache-2.0
"""The process that writes a rank's checkpoints beside the steps, with `checkpoint.async_save`.

Megatron-Core spawns it when training is set up: `PersistentAsyncCaller` of its `dist_checkpointing`.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from tp_invariant_recipes.replacement import Replacement, applied
from tp_invariant_recipes.start import forking
from tp_invariant_recipes.training import written_hashes

_CALLER = "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller"
_NO_GPU = "the writer takes a GPU and waits for its copies, also where there is none"

_WITHOUT_GPU = (
    Replacement("torch.cuda:device_count", lambda original: lambda: 1, _NO_GPU),
    Replacement("torch.cuda:set_device", lambda original: lambda device: None, _NO_GPU),
    Replacement("torch.cuda:synchronize", lambda original: lambda device=None: None, _NO_GPU),
)


def loop(rank: int, *arguments: Any) -> None:
    """Run Megatron's loop, which hashes what it writes, on the rank's own GPU."""
    forking.serve_starter()
    import torch
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    with applied([written_hashes.WRITES, *(() if torch.cuda.is_available() else _WITHOUT_GPU)]):
        # Megatron takes GPU `rank % count`. Were it not the rank's, it would wait for the copies of another one.
        PersistentAsyncCaller.async_loop(int(os.environ["LOCAL_RANK"]), *arguments)


def _copied(original: Callable[..., None]) -> Callable[..., None]:
    def prepare_write_data(writer: Any, plan: Any, planner: Any) -> None:
        original(writer, plan, planner)
        writer.write_buckets = [
            (path, name, (data, [(item, tensor.clone() if tensor.is_cpu else tensor) for item, tensor in tensors]))
            for path, name, (data, tensors) in writer.write_buckets
        ]

    return prepare_write_data


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    watched = []

    def get_process(*arguments: Any, **options: Any) -> Any:
        process = original(*arguments, **options)
        if process not in watched:
            watched.append(process)
            process.ended_by_us = False
            threading.Thread(target=_end_with, args=(process,), daemon=True).start()
        return process

    return staticmethod(get_process)


def _end_with(process: Any) -> None:
    """End the rank when its writer has failed: Megatron would wait for it for ever."""
    wait([process.sentinel])
    process.join()
    if process.exitcode and not process.ended_by_us:
        print(f"the process that writes checkpoints ended with status {process.exitcode}", flush=True)
        os._exit(1)


REPLACEMENTS = (
    Replacement(f"{_CALLER}.async_loop", lambda original: loop,
        "the writer would outlive a killed rank, and send no hashes"),
    Replacement(
        "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.prepare_write_data",
        _copied,
        "what lies in host memory would move into memory shared with the writer, and change there with the next step",
    ),
    Replacement(f"{_CALLER}._get_process", _watched, "a rank would wait for a dead writer for ever"),
)  # fmt: skip


def _announced(original: Callable[..., None], callbacks: Sequence[Any]) -> Callable[..., None]:
    def schedule_async_save(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        for callback in callbacks:
            getattr(callback, "on_checkpoint_scheduled", lambda: None)()

    return schedule_async_save


@contextmanager
def installed(callbacks: Sequence[Any]) -> Iterator[None]:
    """For a run with `checkpoint.async_save`: the writer hashes, ends with its rank, and a rank with its writer.

    callbacks: the `on_checkpoint_scheduled()` of those that have one is called after the step that is saved.
    """
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    announced = Replacement(
        "megatron.bridge.training.checkpointing:schedule_async_save",
        partial(_announced, callbacks=callbacks),
        "what callbacks have to do after the saved step, on_checkpoint_save would ask of a later one",
    )
    with applied([*REPLACEMENTS, announced]):
        try:
            yield
        finally:
            process = PersistentAsyncCaller._persistent_process
            if process is not None:  # Megatron ends it only after a save
                process.ended_by_us = True
                process.kill()
                process.join()
                PersistentAsyncCaller._persistent_process = None
