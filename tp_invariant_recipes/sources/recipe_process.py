# SPDX-License-Identifier: Apache-2.0
"""Questions about a recipe: a process of its own calls the recipe, prints its answer as JSON, and ends.

What a recipe patches, sets or ends reaches neither tpi nor the ranks of another run, which import their recipe again
(`recipe_layer.enter`). The process is a fork: a fresh interpreter would import Bridge, which takes 3 to 10 s, for each
question.

Answers of Bridge's own recipes are kept in the user's cache. One counts while everything that it came from is as it
was: the question, the folder, the kinds of GPUs, Python, the sources of tpi, Bridge and Megatron-Core, other packages'
versions, the configurations in the cache of Hugging Face or `recipe.hf_folder`, and the environment variables that the
recipe has read or set. A user's own recipe may read anything, so every command calls it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from tp_invariant_recipes.errors import ConfigError, TpiError
from tp_invariant_recipes.machine import gpus, terminal
from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.settings import conf_files
from tp_invariant_recipes.sources import recipe_source
from tp_invariant_recipes.start import cache, forking

FOLDER = "recipes"  # of the answers, in the user's cache
MOST = 50  # answers there
_PACKAGES = ("megatron-bridge", "megatron-core", "torch", "transformers", "transformer-engine", "nvidia-modelopt")
_SOURCES = ("megatron.bridge", "megatron.core")  # some people edit them in place
# Variables that Bridge and the library of Hugging Face read when they are imported, before any recipe is called.
_AT_IMPORT = (
    "HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "NEMO_HOME", "NEMO_DATASETS_CACHE", "NEMO_MODELS_CACHE",
)  # fmt: skip

_exit = os._exit
_processes: set[int] = set()  # this one's id, where it may call recipes
_told: set[str] = set()


def serve() -> None:
    """Let this process call recipes itself: it forks no ranks."""
    _processes.add(os.getpid())


def serves() -> bool:
    """Whether this process calls recipes itself."""
    return os.getpid() in _processes


def ask(model: str, make: Callable[[], Any], *question: Any, hf_folder: str | None = None) -> Any:
    """Return the answer to a question about a recipe, a value of JSON: a kept one, or what `make` returns.

    make: runs in a process that may import and call the recipe. question: all that its answer follows from, beside what
    the cache knows. hf_folder: as for `recipe_source.call`.
    Raises ConfigError: as `recipe_source.preload`, `make` raises a TpiError, or the recipe raises anything or ends its
    process; RuntimeError: a defect of tpi.
    """
    if serves():
        return make()
    key = _key(model, question, hf_folder) if recipe_source.of_bridge(model) else None
    if key is not None:
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            stored = cache.find(f"{FOLDER}/{key}")
            if stored["key"] == key and stored["variables"] == _variables(key, stored["variables"]):
                return stored["answer"]
    if model not in _told:
        _told.add(model)
        terminal.print_line(terminal.console(stderr=True), f"calling {model}, which imports Megatron-Bridge")
    recipe_source.preload(model)
    answer, read = _forked(model, make)
    if key is not None:
        cache.keep(f"{FOLDER}/{key}", {"key": key, "variables": _variables(key, read), "answer": answer})
        cache.prune(FOLDER, MOST)
    return answer


def _forked(model: str, make: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return what `make` returns in a fork, and the environment variables that the recipe has read or set there."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as report:
        starter = os.getpid()
        pid = os.fork()
        if pid == 0:
            _answer(model, make, report, starter)
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except BaseException:  # Ctrl-C
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        if code != 0:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            raise ConfigError(f"{model}: the recipe's process {how}")
        report.seek(0)
        told = json.load(report)
    if problems := told["problems"]:
        raise ConfigError(problems[0], problems[1:])
    if defect := told["defect"]:
        raise RuntimeError(f"in the process of a recipe:\n{defect}")
    return told["answer"], told["read"]


def _answer(model: str, make: Callable[[], Any], report: IO[str], starter: int) -> NoReturn:
    """Call `make`, write what it returns or raises, and end this process.

    problems: the message of a mistake, and the same one by one. defect: the traceback of another exception.
    """
    status = 1
    try:
        serve()
        forking.end_with_it(starter)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent: KeyboardInterrupt is the recipe's own
        os._exit = _say_where
        told: dict[str, Any] = {"answer": None, "read": [], "problems": [], "defect": None}
        recipe_source.READ.clear()
        try:
            told["answer"] = make()
            told["read"] = sorted(recipe_source.READ)
        except TpiError as error:
            told["problems"] = [str(error), *getattr(error, "problems", ())]
        except BaseException as error:
            told["defect"] = traceback.format_exc()
            if recipe_source.place(error):
                told["problems"] = [f"{model}: {recipe_source.raised(error)}"]
        json.dump(told, report)
        report.flush()
        status = 0
    finally:
        _exit(status)


def _say_where(status: int) -> NoReturn:
    """`os._exit` for a recipe: with a traceback. A process that the recipe forks ends as usual."""
    if os.getpid() in _processes:
        raise SystemExit(status)
    _exit(status)


def _key(model: str, question: tuple[Any, ...], hf_folder: str | None) -> str | None:
    """SHA-256 of all that is known before a recipe is called; None: this folder is no more."""
    with suppress(OSError):
        parts = [
            [model, hf_folder, *question],
            os.getcwd(),
            [sys.version, sys.prefix, sys.flags],
            [installed(package) for package in _PACKAGES],
            sorted({(gpu.name, gpu.capability) for gpu in gpus.visible()}),
            [os.environ.get(name) for name in _AT_IMPORT],
            cache.stamp([*conf_files.sources(), *_sources(), *_configurations(hf_folder)]),
        ]
        return hashlib.sha256(json.dumps(parts).encode(errors="surrogateescape")).hexdigest()
    return None


def _variables(key: str, names: Any) -> dict[str, str]:
    """Return a hash of each variable's value, which may be secret."""
    return {
        name: hashlib.sha256(f"{key} {name} {os.environ.get(name)!r}".encode(errors="surrogateescape")).hexdigest()
        for name in names
    }


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
        yield from Path(hf_folder).glob("*")
