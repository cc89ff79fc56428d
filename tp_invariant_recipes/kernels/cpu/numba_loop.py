"""Loops over arrays that numba compiles once a machine, and again when a source of theirs has changed."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from numba import njit, types
from numba.extending import intrinsic


def threads() -> int:
    """Return a rank's share of the processors, or as many as torch has."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(torch.get_num_threads(), len(os.sched_getaffinity(0)) // ranks)


def by_parts(loop: Callable[[int, int], object], count: int, *, pays: bool) -> None:
    """Call loop(first, last) for parts of range(count), side by side if that `pays`. It has to release the GIL."""
    parts = min(threads(), count) if pays else 1
    if parts <= 1:
        loop(0, count)
        return
    borders = [*pairwise(count * part // parts for part in range(parts + 1))]
    others = [_pool(os.getpid()).submit(loop, *ends) for ends in borders[1:]]
    loop(*borders[0])
    for done in others:
        done.result()


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """process: whose threads they are; a forked process has none of its parent's."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)))


@intrinsic
def fma(typing_context: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z of fp32 numbers, rounded once: by the processor or, where it cannot, the C library."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), code


OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True}


def cpu_loop(function: Callable) -> Any:
    """Compile a loop. The result is kept beside the file or in the user's cache.

    numba compares a kept result with the file that has the loop. This function compares it with all files of
    the same room of the package, and with those of kernels/: the loop contains their functions and constants.
    """
    compiled = njit(cache=True, **OPTIONS)(function)
    file = compiled._cache._cache_file
    file._source_stamp = (file._source_stamp, _stamp_of_sources(Path(function.__code__.co_filename).parent))
    return compiled


@cache
def _stamp_of_sources(folder: Path) -> str:
    """Return a hash of the files that a loop in this folder can take functions and constants from."""
    kernels = Path(__file__).parents[1]
    package = kernels.parent
    room = package / folder.relative_to(package).parts[0] if folder.is_relative_to(package) else folder
    files = sorted({*room.rglob("*.py"), *kernels.rglob("*.py")})
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()
