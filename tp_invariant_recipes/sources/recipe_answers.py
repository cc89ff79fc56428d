"""What a recipe says, kept in the user's cache: importing Bridge and calling the recipe takes 5 to 40 s.

An answer counts while everything that it came from is as it was: the question, the environment variables, the folder,
the GPUs, Python and its path, the sources of tpi, and what the recipe's process read: files, folders and modules.
What does anything else, such as start a program or look at the clock, is not kept (`recipe_reads`).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.settings import conf_files
from tp_invariant_recipes.settings.tables import kept
from tp_invariant_recipes.sources import recipe_reads, recipe_source

FOLDER = "recipes"  # in the user's cache
MOST = 50  # answers there
# Variables that a shell sets anew for each command.
_OF_THE_SHELL = {"_", "OLDPWD", "SHLVL", "COLUMNS", "LINES"}

_keys: dict[tuple[Any, ...], str] = {}  # question -> key, in this process and those that it forks
_known: dict[str, Any] = {}  # key -> answer
_bridges: dict[str, tuple[str | None, str]] = {}  # variable -> its value before the import of Bridge, and after
_bridges_path: list[str] = []  # what that import adds to Python's path


def prepare(model: str, *question: Any) -> None:
    """Look the answer to a question about a recipe up, or import Bridge; then `answer` may be called in a fork.

    Raises ConfigError as `recipe_source.preload`.
    """
    if known(*question):
        return
    before, path = dict(os.environ), [*sys.path]
    recipe_source.preload(model)
    _bridges.update({n: (before.get(n), value) for n, value in os.environ.items() if before.get(n) != value})
    _bridges_path.extend(folder for folder in sys.path if folder not in path)


def known(*question: Any) -> bool:
    """Whether the cache has the answer to a question. The processes forked after this call have it, or keep theirs."""
    _keys.pop(question, None)
    try:
        key = _keys[question] = _key(question)
    except OSError:  # of a folder that is no more
        return False
    _known.pop(key, None)
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        stored = kept.find(f"{FOLDER}/{key}")
        if stored["key"] == key and recipe_reads.unchanged(stored["files"], stored["folders"]):
            _known[key] = stored["answer"]
    return key in _known


def answer(make: Callable[[], Any], own: Path | None, *question: Any) -> Any:
    """The answer to a question, a value of JSON: the one that `known` has found, or what `make` returns.

    `make` runs in a process of the recipe alone. own: as for `recipe_reads.recorded`.
    """
    key = _keys.get(question)
    if key is None:
        return make()
    if key not in _known:
        with recipe_reads.recorded(own) as reads:
            made = make()
        if reads.refused is None:
            kept.keep(f"{FOLDER}/{key}", {"key": key, "files": reads.files, "folders": reads.folders, "answer": made})
            kept.prune(FOLDER, MOST)
        _known[key] = made
    return _known[key]


def _key(question: tuple[Any, ...]) -> str:
    """SHA-256 of all that is known before a recipe runs. Values of variables, which may be secret, are in it alone."""
    variables = {name: value for name, value in os.environ.items() if name not in _OF_THE_SHELL}
    for name, (before, after) in _bridges.items():
        if variables.get(name) == after:
            variables.pop(name)
            variables |= {} if before is None else {name: before}
    parts = [
        question,
        sorted(variables.items()),
        os.getcwd(),
        [sys.version, sys.prefix, sys.flags],
        [(folder, recipe_reads.modules_in(folder)) for folder in sys.path if folder not in _bridges_path],
        [asdict(gpu) for gpu in gpus.visible()],
        kept.stamp(conf_files.sources()),
    ]
    return hashlib.sha256(json.dumps(parts).encode(errors="surrogateescape")).hexdigest()
