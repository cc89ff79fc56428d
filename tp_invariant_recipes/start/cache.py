# SPDX-License-Identifier: Apache-2.0
"""The user's folders: answers that take seconds to make, each with a stamp of its sources, and Python's bytecode."""

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Any

from tp_invariant_recipes import reading
from tp_invariant_recipes.files import write_atomically


def cache_dir() -> Path:
    """`tpi` in the user's cache: what tpi can make again. It may not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "tpi"


def state_dir() -> Path:
    """`tpi` in the user's state: what tpi cannot make again, such as its list of jobs. It may not exist yet."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "tpi"


LIMIT = 16 * reading.MIB


def find(name: str) -> Any:
    """Return what `keep` has kept under a name, or what another program put there. Raises OSError, ValueError."""
    return reading.parse_json(reading.read_limited(_file(name), LIMIT))


def keep(name: str, value: Any) -> None:
    """Keep a value of JSON. One that cannot be kept is not, which costs time only."""
    with suppress(OSError, ValueError, TypeError):
        _file(name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_file(name), json.dumps(value, allow_nan=False))


def prune(folder: str, most: int) -> None:
    """Leave the latest values of a folder of the cache, and remove the others."""
    with suppress(OSError):
        files = sorted((cache_dir() / folder).glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        for file in files[:-most]:
            file.unlink()


def _file(name: str) -> Path:
    return cache_dir() / f"{name}.json"


def stamp(sources: Iterable[Path]) -> str:
    """SHA-256 of the interpreter, and of every source's path, size and time of change in ns."""
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted(sources):
        state = None
        with suppress(OSError):  # a link that leads nowhere
            state = path.stat()
        digest.update(f"\n{path} {state and (state.st_size, state.st_mtime_ns)}".encode(errors="surrogateescape"))
    return digest.hexdigest()


PACKAGES = ("tp_invariant_recipes", "torch", "megatron.core", "megatron.bridge", "transformer_engine")


def keep_bytecode() -> Path | None:
    """From now on have Python keep bytecode in `bytecode_folder`, if it would keep none of a package that lacks it.

    returns: the folder; None: Python keeps bytecode where it always does, the user has chosen a folder
    (PYTHONPYCACHEPREFIX), or ours cannot be written.
    """
    if sys.pycache_prefix is not None or not packages_without_bytecode() or not _writable(bytecode_folder()):
        return None
    sys.pycache_prefix, sys.dont_write_bytecode = str(bytecode_folder()), False
    return bytecode_folder()


def bytecode_folder() -> Path:
    """In tpi's cache. Python checks the time of each source."""
    return cache_dir() / "bytecode"


def packages_without_bytecode() -> list[str]:
    """Those of PACKAGES that are installed without bytecode, where Python will not write it. Imports none of them."""
    files = {name: file for name in PACKAGES if (file := _bytecode(name))}
    writes = not sys.dont_write_bytecode
    return [name for name, file in files.items() if not (file.exists() or (writes and _writable(file)))]


def _bytecode(package: str) -> Path | None:
    """Return the file for the bytecode of a package's first module; None: the package is not installed, or has no
    source.
    """
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None or not spec.has_location or not spec.origin.endswith(".py"):
        return None
    return Path(cache_from_source(spec.origin))


def _writable(path: Path) -> bool:
    return os.access(next(parent for parent in path.parents if parent.exists()), os.W_OK)
