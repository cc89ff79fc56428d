# SPDX-License-Identifier: Apache-2.0
"""Whether what a folder names may run code.

A run names its recipe, functions by their paths, the interpreter of its nodes and lines of bash. They run when somebody
resumes, repeats, scores or exports the run, so a folder from elsewhere would run a stranger's code. What this user's
own tpi has written is sealed, by a hash with this user's key, and runs again; a recipe only while its file is the same
and nobody else can change it. Of other folders, what is typed again runs, or everything with --trust-recipe.
"""

import hashlib
import hmac
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tp_invariant_recipes.config.overrides import Override, parse_all
from tp_invariant_recipes.errors import RunError, refuse
from tp_invariant_recipes.ledger.run_files import LARGEST_CONFIG, RunFile
from tp_invariant_recipes.reading import read_limited
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.runs.sweep_dir import Sweep
from tp_invariant_recipes.settings import field_table, schema
from tp_invariant_recipes.sources import recipe_source
from tp_invariant_recipes.start.cache import state_dir

_BYTES = 32  # of a key


def seal(content: Any) -> str:
    """Return the seal of a value of JSON; empty: this user has no key, and none can be written."""
    key = _key() or _new_key()
    return hmac.digest(key, json.dumps(content, sort_keys=True).encode(), "sha256").hex() if key else ""


def is_own(content: Any, seal_: str) -> bool:
    """Whether this user's tpi sealed the value."""
    return bool(seal_) and _key() is not None and hmac.compare_digest(seal(content).encode(), seal_.encode())


def others_can_change(file: Path) -> str | None:
    """Why the contents of a file are not the user's alone; None: they are.

    A folder that others can write lets them put there what the file imports. What belongs to root is trusted.
    """
    for path in (file.resolve(), file.resolve().parent):
        try:
            status = path.stat()
        except OSError as error:
            return f"{path}: {error.strerror}"
        if status.st_uid not in (os.geteuid(), 0):
            return f"{path} belongs to another user"
        if status.st_mode & 0o022:
            return f"others can write {path} (chmod go-w)"
    return None


def _file() -> Path:
    return state_dir() / "seal.key"


def _key() -> bytes | None:
    """Return the user's key; None: there is none that only this user can read and write."""
    try:
        status, key = _file().stat(), _file().read_bytes()
    except OSError:
        return None
    return key if len(key) == _BYTES and status.st_uid == os.geteuid() and not status.st_mode & 0o077 else None


def _new_key() -> bytes | None:
    """Write a key where there is none: a file that another process writes now is whole soon."""
    with suppress(OSError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(_file(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(os.urandom(_BYTES))
    return _key()


# Settings whose value runs: a command, its options, variables of a process, or files that it imports.
RUN_CODE = (
    *("cluster.environment", "cluster.container", "cluster.mounts", "cluster.python", "cluster.srun_options"),
    *("slurm.setup", "slurm.options", "recipe.hf_folder"),
)
# Packages whose functions and classes any run may name.
PACKAGES = ("megatron", "torch", "transformer_engine", "tp_invariant_recipes")
_FOREIGN = "your tpi has not written this folder, or somebody has changed it or the recipe's file"
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")

trusted: list[bool] = []  # not empty: this command has --trust-recipe, and the folders that it reads may run code


def sealing(run_dir: RunDir) -> tuple[list[Any], str] | None:
    """Return what the seal of a run covers, and the seal; None: there is no run."""
    try:
        run = run_dir.read_run(RunFile)
        return _content(run, run_dir.config), run.seal
    except (OSError, ValueError, RunError):
        return None


def sealed[R: (RunFile, Sweep)](
    record: R, config: Path | None = None, before: tuple[list[Any], str] | None = None
) -> R:
    """Return the file of a run, or of runs that are planned, with its seal.

    config: of a run: its config.yaml, which is written. before: the run that a job continues, as `sealing` had it,
    whose seal counts if nothing of it changes: the job's container may lack the user's key.
    """
    content = _content(record, config)
    return replace(record, seal=before[1] if before and before[0] == content else seal(content))


def require(
    where: Path,
    record: RunFile | Sweep,
    config: Path | None = None,
    without: Iterable[str] = (),
    *,
    typed_model: bool = False,
) -> None:
    """Raise ConfigError that lists what a run, or planned runs, name that must not run.

    config: as for `sealed`. without: paths of overrides that are typed again or left out. typed_model: whether the
    model is typed again.
    """
    if trusted:
        return
    own, dropped = _is_own(record, config), {*without}
    overrides = () if own else parse_all(_overrides(record))
    problems = [
        _refusal(where, override.text)
        for override in overrides
        if override.path not in dropped and _runs_code(override)
    ]
    if not typed_model and recipe_source.is_users(record.model):
        file = recipe_source.file_of(record.model) if own else None
        if why := others_can_change(file) if file else _FOREIGN:
            problems.append(_refusal(where, record.model, why))
    refuse(problems)


def require_config(run_dir: RunDir, run: RunFile) -> None:
    """Raise ConfigError that lists what the config.yaml of a run names that must not run."""
    if not trusted and not _is_own(run, run_dir.config):
        leaves = _leaves(run_dir.read_config(), "")
        refuse([_refusal(run_dir.path, f"{path}={value}") for path, value in leaves if _imports(path, value)])


def _content(record: RunFile | Sweep, config: Path | None) -> list[Any]:
    """Return what a seal covers. Raises OSError, ValueError: config.yaml cannot be read."""
    hashed = hashlib.sha256(read_limited(config, LARGEST_CONFIG)).hexdigest() if config else None
    return [record.model, _overrides(record), hashed, recipe_source.known_digest(record.model)]


def _overrides(record: RunFile | Sweep) -> list[str]:
    if isinstance(record, RunFile):
        return [*record.overrides]
    return [text for cell in record.cells for text in cell.overrides]


def _is_own(record: RunFile | Sweep, config: Path | None) -> bool:
    try:
        return is_own(_content(record, config), record.seal)
    except (OSError, ValueError):
        return False


def _refusal(where: Path, what: str, why: str = _FOREIGN) -> str:
    return (
        f"{where} names {what}, which would run code: {why}; type it again (tpi train and tpi submit take it beside "
        "--resume), or add --trust-recipe if you trust this folder"
    )


def _runs_code(override: Override) -> bool:
    """Whether an override names a file, a command or a function that a stranger may have chosen."""
    if override.path in RUN_CODE or override.path.startswith("cluster.environment.") or override.given_file:
        return True
    if override.wrong is not None or override.deletes:
        return False
    value = override.value if override.several else override.data
    return any(_imports(path, leaf) for path, leaf in _leaves(value, override.path))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner, path)
    else:
        yield path, value


def _imports(path: str, value: Any) -> bool:
    """Whether a value makes Bridge or Megatron import something outside of PACKAGES."""
    section, _, field = path.partition(".")
    if path.endswith(("trust_remote_code", "metadata_path")):
        return value not in (None, False)
    if not isinstance(value, str) or section not in schema.BRIDGE_SECTIONS or not _DOTTED.fullmatch(value):
        return False
    classes = schema.PROVIDERS if section == "model" else (schema.BRIDGE_SECTIONS[section],)
    table = field_table.read()
    if any(table.get(cls, {}).get(field) is not None for cls in classes):  # text or a number
        return False
    first, *others = value.split(".")
    return first not in PACKAGES or any(name in sys.stdlib_module_names for name in others)  # as of torch.os.system
