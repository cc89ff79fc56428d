"""What a recipe of Bridge says, kept in the user's cache: importing Bridge and calling the recipe takes 5 to 40 s.

An answer counts while everything that it came from is as it was: the question, the environment variables, the folder,
the GPUs, Python, the sources of tpi, Bridge and Megatron-Core, other packages' versions, and the configurations in the
cache of Hugging Face or `recipe.hf_folder`. A user's own recipe may read anything, so it is called by every command.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.settings import conf_files
from tp_invariant_recipes.sources import recipe_source
from tp_invariant_recipes.start import cache

FOLDER = "recipes"  # in the user's cache
MOST = 50  # answers there
_PACKAGES = ("megatron-bridge", "megatron-core", "torch", "transformers", "transformer-engine", "nvidia-modelopt")
_SOURCES = ("megatron.bridge", "megatron.core")  # some people edit them in place
# Variables that a shell sets anew for each command.
_OF_THE_SHELL = {"_", "OLDPWD", "SHLVL", "COLUMNS", "LINES"}

_keys: dict[tuple[Any, ...], str] = {}  # question -> key, in this process and those that it forks
_known: dict[str, Any] = {}  # key -> answer
_bridges: dict[str, tuple[str | None, str]] = {}  # variable -> its value before the import of Bridge, and after


def prepare(model: str, *question: Any, hf_folder: str | None = None) -> None:
    """Look the answer to a question about a recipe up, or import Bridge; then `answer` may be called in a fork.

    Raises ConfigError as `recipe_source.preload`.
    """
    if _find(model, question, hf_folder):
        return
    before = dict(os.environ)
    recipe_source.preload(model)
    _bridges.update({n: (before.get(n), value) for n, value in os.environ.items() if before.get(n) != value})


def answer(make: Callable[[], Any], *question: Any) -> Any:
    """Return the answer to a question, a value of JSON: the one that `prepare` has found, or what `make` returns."""
    key = _keys.get(question)
    if key is None:
        return make()
    if key not in _known:
        _known[key] = made = make()
        cache.keep(f"{FOLDER}/{key}", {"key": key, "answer": made})
        cache.prune(FOLDER, MOST)
    return _known[key]


def _find(model: str, question: tuple[Any, ...], hf_folder: str | None) -> bool:
    """Whether the cache has the answer to a question. The processes forked after this call have it, or keep theirs."""
    _keys.pop(question, None)
    if not recipe_source.of_bridge(model):
        return False
    try:
        key = _keys[question] = _key(question, hf_folder)
    except OSError:  # of a folder that is no more
        return False
    _known.pop(key, None)
    with suppress(OSError, ValueError, KeyError, TypeError):
        stored = cache.find(f"{FOLDER}/{key}")
        if stored["key"] == key:
            _known[key] = stored["answer"]
    return key in _known


def _key(question: tuple[Any, ...], hf_folder: str | None) -> str:
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
        [installed(package) for package in _PACKAGES],
        [asdict(gpu) for gpu in gpus.visible()],
        cache.stamp([*conf_files.sources(), *_sources(), *_configurations(hf_folder)]),
    ]
    return hashlib.sha256(json.dumps(parts).encode(errors="surrogateescape")).hexdigest()


@functools.cache
def _sources() -> tuple[Path, ...]:
    """Return the files of Bridge and Megatron-Core."""
    files: list[Path] = []
    for name in _SOURCES:
        with suppress(ImportError):  # `recipe_source.preload` says what is missing
            spec = importlib.util.find_spec(name)
            for folder in (spec.submodule_search_locations or ()) if spec else ():
                files += Path(folder).rglob("*.py")
    return tuple(files)


def _configurations(hf_folder: str | None) -> Iterator[Path]:
    """Yield the configurations of models that a recipe may read."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    yield from hub.glob("models--*/refs/*")
    yield from hub.glob("models--*/snapshots/*/*.json")
    if hf_folder is not None:
        yield from Path(hf_folder).glob("*.json")
