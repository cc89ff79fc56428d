# SPDX-License-Identifier: Apache-2.0
"""Find a recipe: a function that returns Megatron-Bridge's ConfigContainer, as `recipe=` names it.

    recipe=qwen3_8b_pretrain_config        of megatron.bridge.recipes
    recipe=my_package.my_module:function   of a module that can be imported
    recipe=FILE.py:function                of a file

Names are checked against a table first: an import of Bridge takes seconds.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from tp_invariant_recipes.errors import ConfigError, reason
from tp_invariant_recipes.machine.versions import installed, pinned
from tp_invariant_recipes.reading import MIB, read_limited
from tp_invariant_recipes.replacement import Replacement, applied
from tp_invariant_recipes.settings.keys import nearest
from tp_invariant_recipes.start import bridge, needed
from tp_invariant_recipes.start.bridge import quiet

PREFIX = "recipe="
BRIDGE = "megatron.bridge.recipes"
BENCHMARKS = "megatron.bridge.perf_recipes"
FORMS = f"recipe=NAME of {BRIDGE}, recipe=MODULE:FUNCTION or recipe=FILE.py:FUNCTION"

NEEDS = "needs the Hugging Face configuration of"
LARGEST = 4 * MIB  # bytes of a recipe's file
FILES = "tpi_recipe_"  # of the names that the files of recipes have as modules

# What calls Hugging Face for a model's configuration. Bridge would try four times, seven seconds in all.
_LOADER = "megatron.bridge.models.conversion.auto_bridge:safe_load_config_with_retry"
_FOLDER = "megatron.bridge.models.conversion.auto_bridge:AutoBridge.from_hf_pretrained"
_CONFIG = "transformers.models.auto.configuration_auto:AutoConfig.from_pretrained"
_OFFLINE = "huggingface_hub.constants:HF_HUB_OFFLINE"

# The environment variables that recipes have read or set in this process.
READ: set[str] = set()

# Top-level names of the modules of recipes that this process has imported, and the folders of their files.
_OWN: set[str] = set()


@dataclass(frozen=True)
class Source:
    """Where a recipe is defined.

    module:   dotted name; None: in a file.
    file:     absolute path; None: in a module.
    function: its name there.
    """

    module: str | None
    file: Path | None
    function: str

    def __str__(self) -> str:
        where = f"{self.file or self.module}:"
        return f"{'' if self.module == BRIDGE else where}{self.function}"


def is_recipe(model: str) -> bool:
    """Whether what stands for a model names a recipe."""
    return model.startswith(PREFIX)


def absolute(model: str | None) -> str | None:
    """Return the model with the path of a recipe's file made absolute: runs can resume from any directory.

    What names no recipe, or none that could be read, stays as it is.
    """
    if model is None or not is_recipe(model):
        return model
    try:
        return f"{PREFIX}{parse(model)}"
    except ConfigError:
        return model


def parse(model: str) -> Source:
    """Read `recipe=…`. Raises ConfigError: it has none of the three forms, or the file is not there."""
    text = model.removeprefix(PREFIX).strip()
    where, colon, function = text.rpartition(":")
    if not colon:
        if text.endswith(".py") or "/" in text:
            raise ConfigError(f"{model}: which function of this file? recipe={text}:FUNCTION")
        if not text.isidentifier():
            raise ConfigError(f"{model}: names no function; {FORMS}")
        return Source(BRIDGE, None, text)
    if not function.isidentifier():
        raise ConfigError(f"{model}: '{function}' is no name of a function; {FORMS}")
    if where.endswith(".py") or "/" in where:
        file = Path(where).expanduser().absolute()
        if not file.is_file():
            raise ConfigError(f"{model}: {'not a file' if file.exists() else 'there is no such file'}: {file}")
        return Source(None, file, function)
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", where):
        raise ConfigError(f"{model}: '{where}' is neither a module nor a file that ends in .py; {FORMS}")
    return Source(where, None, function)


@functools.cache
def names() -> tuple[str, ...]:
    """Return the recipes of the Bridge in the locks, from a table; a test compares it with the installed Bridge."""
    return tuple(json.loads(Path(__file__).with_name("bridge_recipes.json").read_text(encoding="utf-8")))


def installed_names() -> tuple[str, ...]:
    """Return the recipes of the installed Bridge: its functions that end in `_config`. Imports Bridge."""
    bridge.load()
    return tuple(sorted(_recipes(importlib.import_module(BRIDGE))))


def _recipes(module: ModuleType) -> dict[str, Callable[..., Any]]:
    return {n: inspect.unwrap(f) for n, f in vars(module).items() if n.endswith("_config") and inspect.isfunction(f)}


def preload(model: str) -> None:
    """Import of Bridge what the recipe imports, and nothing of the recipe's own. Raises ConfigError as `find`.

    Otherwise each of its processes would, which takes seconds.
    """
    source = _possible(model)
    text = _text(model, source.file).decode(errors="replace") if source.file else BRIDGE
    bridge.load()
    if BRIDGE in text:
        with quiet():
            importlib.import_module(BRIDGE)


def _possible(model: str) -> Source:
    """Read `recipe=…`. Raises ConfigError: it names nothing, as far as that can be told without importing Bridge."""
    source = parse(model)
    if not needed.there("megatron.bridge"):
        raise ConfigError(needed.message(model, ["megatron-bridge"]))
    if source.module == BRIDGE:
        # A misspelt name is said at once. Another name that the table lacks may be one of a newer Bridge.
        locked = installed("megatron-bridge") == pinned().get("megatron-bridge")
        close = nearest(source.function, names())
        if source.function not in names() and (locked or "did you mean" in close):
            raise ConfigError(f"{model}: {BRIDGE} has no such recipe{close}")
    elif source.file:
        _check_file(model, source.file, source.function)
    return source


def _check_file(model: str, file: Path, function: str) -> None:
    """Raise ConfigError: a recipe's file cannot be imported, or has no such name, as far as its source tells."""
    source = _text(model, file)
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(source, str(file), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{model}: {file} cannot be imported: {_error_text(error)}") from error
    text = source.decode(errors="replace")
    if not re.search(rf"\b{function}\b|import \*|__getattr__", text):  # the latter two may give it any name
        functions = re.findall(r"^(?:async )?def ([^\W_]\w*)", text, re.MULTILINE)
        raise ConfigError(f"{model}: {file} has no such function{nearest(function, functions)}")


def _text(model: str, file: Path) -> bytes:
    """Return the contents of a recipe's file. Raises ConfigError."""
    try:
        return read_limited(file, LARGEST)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model}: cannot read {file}: {reason(error)}") from error


def of_bridge(model: str) -> bool:
    """Whether a recipe is one of Bridge's. Raises ConfigError as `parse`."""
    return str(parse(model).module).partition(".")[0] == "megatron"


def find(model: str) -> Callable[..., Any]:
    """Return the function that `recipe=…` names. Imports Bridge, and the module or runs the file.

    Raises ConfigError.
    """
    source = _possible(model)
    bridge.load()
    module = _module(model, source)
    function = getattr(module, source.function, None)
    if function is None:
        functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != "_"]
        known = installed_names() if source.module == BRIDGE else functions
        raise ConfigError(
            f"{model}: {source.file or source.module} has no such function{nearest(source.function, known)}"
        )
    if not callable(function):
        raise ConfigError(f"{model}: {source.function} is no function but {type(function).__name__}")
    return function


def _module(model: str, source: Source) -> ModuleType:
    """Return the module of a recipe. Raises ConfigError: it cannot be imported, in the words of what failed."""
    if source.module != BRIDGE:
        _OWN.add(str(source.file.parent) if source.file else str(source.module).partition(".")[0])
    try:
        with quiet():
            return _of_file(source.file) if source.file else importlib.import_module(str(source.module))
    except BaseException as error:  # another one's code may raise anything
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{source.module}.".startswith(f"{absent}."):
            raise ConfigError(f"{model}: there is no module {absent} that Python finds (PYTHONPATH)") from error
        where = source.file or source.module
        raise ConfigError(f"{model}: {where} cannot be imported: {_error_text(error)}{place(error)}") from error


@functools.cache
def _of_file(file: Path) -> ModuleType:
    """Return a file as a module. Its folder is on Python's path meanwhile, so that it can import its neighbours."""
    name = f"{FILES}{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, str(file))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass in it looks its module up there
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(file.parent))
    return module


def call(model: str, hf_folder: str | None) -> Any:
    """Return what the recipe returns: a ConfigContainer. Nothing is fetched from a network.

    hf_folder: what stands for every Hugging Face model that the recipe names; None: the cache of Hugging Face.
    Raises ConfigError: no such recipe, it raises, it returns something else, or a configuration is not on this machine.
    """
    function = find(model)
    needs = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind < 2]
    if needs:
        raise ConfigError(f"{model}: a recipe is called without arguments, and this function needs {', '.join(needs)}")
    from megatron.bridge.training.config import ConfigContainer

    requested: list[str] = []
    try:
        with quiet(), offline(hf_folder, requested), _noted():
            container = function()
    except BaseException as error:  # another one's code may raise anything
        if requested:
            raise ConfigError(_to_fetch(model, requested[-1], hf_folder, error)) from error
        if isinstance(error, OSError) and "huggingface.co" in str(error):  # it asked transformers itself
            raise ConfigError(
                f"{model}: {NEEDS} a model that is not in this machine's cache (HF_HOME): {_error_text(error)}"
            ) from error
        raise ConfigError(f"{model}: {raised(error)}") from error
    if not isinstance(container, ConfigContainer):
        kind = "None" if container is None else f"{type(container).__module__}.{type(container).__qualname__}"
        raise ConfigError(f"{model}: a recipe returns a ConfigContainer, and this one returns {kind}")
    return container


@contextmanager
def _noted() -> Iterator[None]:
    """Note in READ which environment variables the block reads, sets or deletes."""

    def noting(access: Callable[..., Any]) -> Callable[..., Any]:
        def noted(environment: Any, name: Any, *value: Any) -> Any:
            READ.add(str(name))
            return access(environment, name, *value)

        return noted

    names = ("__getitem__", "__setitem__", "__delitem__")
    why = "an answer that is kept counts while these variables are the same"
    with applied([Replacement(f"os:_Environ.{name}", noting, why) for name in names]):
        yield


def raised(error: BaseException) -> str:
    """Return what a recipe has raised, and where. Nothing that it raises ends tpi."""
    ends = f"ends the program (status {error.code})" if isinstance(error, SystemExit) else None
    return f"the recipe {ends or f'raises {_error_text(error)}'}{place(error)}"


def place(error: BaseException) -> str:
    """ " at FILE:LINE", the innermost call of the recipes' own code; empty: there is none."""
    position = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        package, file = str(frame.f_globals.get("__name__")).partition(".")[0], frame.f_code.co_filename
        if package in _OWN or os.path.dirname(file) in _OWN:
            position = f" at {file}:{line}"
    return position


def _error_text(error: BaseException) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__


def _to_fetch(model: str, repository: str, hf_folder: str | None, error: BaseException) -> str:
    if hf_folder is not None:
        return f"{model}: recipe.hf_folder={hf_folder} cannot be used as {repository}: {_error_text(error)}"
    if Path(repository).expanduser().is_dir():
        return f"{model}: the model in {repository} cannot be used: {_error_text(error)}"
    return (
        f"{model}: {NEEDS} {repository}, which is not in this machine's cache; where "
        f"there is a network: hf download {repository} config.json (and set HF_HOME to the same cache here), or "
        f"name a folder with its config.json: recipe.hf_folder=FOLDER"
    )


@contextmanager
def offline(hf_folder: str | None, requested: list[str]) -> Iterator[None]:
    """In the block, models of Hugging Face come from a folder or the cache.

    requested: receives the name of each model whose configuration cannot be loaded.
    """
    named: list[str] = []  # what AutoBridge was asked for

    def from_folder(original: Callable[..., Any]) -> Any:
        def from_hf_pretrained(cls: type, path: Any, **kwargs: Any) -> Any:
            if hf_folder is not None:
                kwargs.pop("revision", None)  # a folder has none
            named.append(str(path))
            try:
                return original.__func__(cls, hf_folder or path, **kwargs)  # type: ignore[attr-defined]
            finally:
                named.pop()

        return classmethod(from_hf_pretrained)

    def of_transformers(original: Callable[..., Any]) -> Any:
        def from_pretrained(cls: type, path: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original.__func__(cls, hf_folder or path, *args, **kwargs)  # type: ignore[attr-defined]
            except Exception:
                requested.append(named[-1] if named else str(path))
                raise

        return classmethod(from_pretrained)

    why = "a recipe resolves without a network, or names the files to fetch"
    with applied(
        [
            Replacement(_OFFLINE, lambda _: True, why),
            Replacement(_LOADER, lambda load: functools.partial(load, max_retries=0), why),
            Replacement(_FOLDER, from_folder, why),
            Replacement(_CONFIG, of_transformers, why),
        ]
    ):
        yield


def digest(model: str) -> str | None:
    """Return the SHA-256 of the file that `recipe=…` names; None: there is none. Raises ConfigError as `parse`."""
    file = file_of(model)
    return hashlib.sha256(_text(model, file)).hexdigest() if file else None


def known_digest(model: str) -> str | None:
    """As `digest`; None, too, where the model is no recipe, or its file cannot be read."""
    try:
        return digest(model) if is_recipe(model) else None
    except ConfigError:
        return None


def is_users(model: str) -> bool:
    """Whether a model is a recipe that is none of Bridge's, or of a form that nobody knows."""
    try:
        module = parse(model).module if is_recipe(model) else BRIDGE
    except ConfigError:
        return True
    return module is None or not f"{module}.".startswith((f"{BRIDGE}.", f"{BENCHMARKS}."))


def file_of(model: str) -> Path | None:
    """Return the file that `recipe=…` names, without importing anything; None: Python's path has no such module.

    Raises ConfigError as `parse`.
    """
    source = parse(model)
    if source.module is None:
        return source.file
    folders, name = None, ""
    for part in source.module.split("."):
        name = f"{name}.{part}".removeprefix(".")
        spec = PathFinder.find_spec(name, folders)
        if spec is None:
            return None
        folders = spec.submodule_search_locations
    return Path(spec.origin) if spec and spec.origin else None
