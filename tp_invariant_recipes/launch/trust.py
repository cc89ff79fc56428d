"""Whether what a folder names may run code.

A run names its recipe, functions by their paths, the interpreter of its nodes and lines of bash. They run when somebody
resumes, repeats, scores or exports the run, so a folder from elsewhere would run a stranger's code. What this user's
own tpi has written is sealed (runs/seal.py) and runs again; a recipe only while its file is the same and nobody else
can change it. Of other folders, what is typed again runs, or everything with --trust-recipe.
"""

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tp_invariant_recipes.config.overrides import Override, parse_all
from tp_invariant_recipes.errors import RunError, refuse
from tp_invariant_recipes.ledger.run_files import LARGEST_CONFIG, RunFile
from tp_invariant_recipes.reading import read_limited
from tp_invariant_recipes.runs import seal
from tp_invariant_recipes.runs.matrix_dir import Matrix
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import schema
from tp_invariant_recipes.settings.tables import field_table
from tp_invariant_recipes.sources import recipe_source

# Settings whose value runs: a command, its options, variables of a process, or files that it imports.
RUN_CODE = (
    *("cluster.environment", "cluster.container", "cluster.mounts", "cluster.python", "cluster.srun_options"),
    *("slurm.setup", "slurm.options", "recipe.hf_folder"),
)
# Packages whose functions and classes any run may name.
PACKAGES = ("megatron", "torch", "transformer_engine", "tp_invariant_recipes")
_FOREIGN = "your tpi has not written this folder, or somebody has changed it"
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")

_trusted: list[bool] = []  # not empty: this command has --trust-recipe


def trust_all() -> None:
    """Let the folders that this command reads run code."""
    _trusted.append(True)


def sealed(run_dir: RunDir) -> tuple[Any, str]:
    """Return what the seal of a run covers, and the seal; empty: it has none."""
    try:
        run = run_dir.read_run(RunFile)
        return _of_run(run.model, run.overrides, run_dir.config), run.seal
    except (OSError, ValueError, RunError):
        return None, ""


def seal_run(model: str, overrides: Sequence[str], config: Path, before: tuple[Any, str]) -> str:
    """Return the seal of a run whose config.yaml is written; empty: it cannot be sealed.

    before: as `sealed` had it. A job keeps the seal of what it does not change: its container may lack the user's key.
    """
    now = _of_run(model, overrides, config)
    return before[1] if before == (now, before[1]) and before[1] else seal.seal(now)


def sealed_matrix(matrix: Matrix) -> Matrix:
    """Return planned runs with the seal of their fields and of the file of their recipe."""
    return replace(matrix, seal=seal.seal(_of_matrix(matrix)))


def require_run(run_dir: RunDir, run: RunFile, without: Iterable[str] = (), *, typed_model: bool = False) -> None:
    """Raise ConfigError that lists what a run names that must not run.

    without: paths of overrides that are typed again or left out. typed_model: whether the model is typed again.
    """
    own, dropped = _is_own(run_dir, run), {*without}
    overrides = [override for override in parse_all(run.overrides) if override.path not in dropped]
    recorded = (run_dir.read_config().get("recipe") or {}).get("source") if own else None
    _require(run_dir.path, None if typed_model else run.model, overrides, own=own, source=recorded)


def require_config(run_dir: RunDir, run: RunFile) -> None:
    """Raise ConfigError that lists what the config.yaml of a run names that must not run."""
    if not _trusted and not _is_own(run_dir, run):
        leaves = _leaves(run_dir.read_config(), "")
        refuse([_refusal(run_dir.path, f"{path}={value}") for path, value in leaves if _imports(path, value)])


def require_matrix(where: Path, matrix: Matrix) -> None:
    """Raise ConfigError that lists what planned runs name that must not run."""
    overrides = parse_all(dict.fromkeys(text for cell in matrix.cells for text in cell.overrides))
    own = seal.is_own(_of_matrix(matrix), matrix.seal)
    _require(where, matrix.model, overrides, own=own, source=recipe_source.known_digest(matrix.model) if own else None)


def _of_run(model: str, overrides: Sequence[str], config: Path) -> dict[str, Any]:
    text = read_limited(config, LARGEST_CONFIG)
    return {"model": model, "overrides": [*overrides], "config": hashlib.sha256(text).hexdigest()}


def _of_matrix(matrix: Matrix) -> dict[str, Any]:
    return {**matrix.as_json(), "seal": None, "source": recipe_source.known_digest(matrix.model)}


def _is_own(run_dir: RunDir, run: RunFile) -> bool:
    try:
        return seal.is_own(_of_run(run.model, run.overrides, run_dir.config), run.seal)
    except (OSError, ValueError):
        return False


def _require(where: Path, model: str | None, overrides: Sequence[Override], *, own: bool, source: str | None) -> None:
    if _trusted:
        return
    problems = [] if own else [_refusal(where, override.text) for override in overrides if _runs_code(override)]
    if model is not None and recipe_source.is_users(model):
        why = None if own else _FOREIGN
        if own and source != recipe_source.known_digest(model):
            why = "its file is not the one that this run was composed of"
        elif own and (file := recipe_source.file_of(model)):
            why = seal.others_can_change(file)
        problems += [_refusal(where, model, why)] if why else []
    refuse(problems)


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
