"""Answers that take seconds to make, kept in the user's cache with a stamp of the files that they come from."""

import hashlib
import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tp_invariant_recipes import reading
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.start.cache import cache_dir

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
