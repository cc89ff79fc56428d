# SPDX-License-Identifier: Apache-2.0
"""Loops over arrays that numba compiles once a machine, and again when a source of theirs has changed."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.extending import intrinsic


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
