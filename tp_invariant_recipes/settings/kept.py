"""Answers that take seconds to make, kept in the user's cache until a file that they come from changes."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tp_invariant_recipes import reading
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.settings.conf_files import cache_dir

LIMIT = 16 * reading.MIB


def answer(name: str, sources: Iterable[Path], make: Callable[[], Any]) -> Any:
    """What `make` returns, a value of JSON; from the cache if every source is as it was.

    name:    of the file in the cache.
    sources: files, by whose places, sizes and times of change the answer is known.
    """
    file, stamp = cache_dir() / f"{name}.json", _stamp(sources)
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = reading.parse_json(reading.read_limited(file, LIMIT))
        if kept["stamp"] == stamp:
            return kept["answer"]
    made = make()
    with suppress(OSError):  # a cache that cannot be written costs time only
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"stamp": stamp, "answer": made}))
    return made


def _stamp(sources: Iterable[Path]) -> str:
    """SHA-256 of the interpreter, and of every source's path, size and time of change in ns."""
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted(sources):
        state = None
        with suppress(OSError):  # a link that leads nowhere
            state = path.stat()
        digest.update(f"\n{path} {state and (state.st_size, state.st_mtime_ns)}".encode())
    return digest.hexdigest()
