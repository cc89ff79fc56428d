# SPDX-License-Identifier: Apache-2.0
"""The files of a run directory: one name for each, and how they are written."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

from tp_invariant_recipes.errors import RunError, reason
from tp_invariant_recipes.files import DISK_FULL, UNFINISHED, shortage, write_atomically
from tp_invariant_recipes.ledger import run_files
from tp_invariant_recipes.ledger.run_files import LARGEST
from tp_invariant_recipes.reading import Record, checked, parse_json, parse_yaml, read_limited
from tp_invariant_recipes.runs.checkpoints import MANIFEST, CheckpointFile, described
from tp_invariant_recipes.settings.run_config import RunConfig


@dataclass(frozen=True)
class IndexManifest(Record):
    """files: path in the cache → the file."""

    schema: Literal[1] = field(default=1, kw_only=True)
    files: dict[str, CheckpointFile]


def remove_unrecorded(cache: Path) -> list[str]:
    """Remove files that the manifest lacks or contradicts, which Megatron builds again, and return them. RunError."""
    recorded = _read(cache)
    wrong = [name for name, file in described(cache).items() if recorded.get(name) != file]
    for name in wrong:
        (cache / name).unlink()
    return wrong


def record(cache: Path) -> None:
    """Write the manifest of a cache that is whole. Raises RunError: a rebuilt file is not the one recorded before."""
    recorded, files = _read(cache), described(cache)
    wrong = sorted(name for name, file in recorded.items() if name in files and files[name] != file)
    if wrong:
        raise RunError(
            f"{cache}: Megatron builds {', '.join(wrong)} with other contents than this run has trained with so far, "
            f"so that its steps to come would read other samples; continue with the versions in versions.json"
        )
    if files and files != recorded:
        manifest = IndexManifest(recorded | files)
        write_atomically(cache / MANIFEST, json.dumps(manifest.as_json(), indent=1))


def _read(cache: Path) -> dict[str, CheckpointFile]:
    file = cache / MANIFEST
    try:
        return checked(IndexManifest, parse_json(read_limited(file, LARGEST))).files if file.exists() else {}
    except (OSError, ValueError) as error:
        raise RunError(f"{file}: {reason(error)}; remove {cache}, and the next start builds it again") from error


class File:
    """A row of a directory's table of files: the path of a name in it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, directory: "RunDir", owner: type) -> Path:
        return directory.path / self.name


@dataclass(frozen=True)
class RunDir:
    """A run directory. Nothing is touched by making this object."""

    path: Path

    config = File("config.yaml")  # the composed configuration, as the ranks read it
    run = File("run.json")  # model, overrides, command and every attempt at this run
    environment = File("environment.json")  # environment variables that numerics depend on
    versions = File("versions.json")  # versions of everything that computes
    ledger = File("ledger.jsonl")  # exact bits, step by step
    progress = File("progress.jsonl")  # step, loss and seconds for a progress bar; comparisons do not read them
    guard = File("guard")  # evidence of corrupted values, and what it says of checkpoints (runs/checkpoints.py)
    logs = File("logs")  # one log a rank, and Bridge's
    bridge_log = File("logs/bridge.log")  # what Bridge prints, of all ranks that print
    checkpoints = File("checkpoints")  # Megatron's distributed checkpoints
    tensorboard = File("tensorboard")  # TensorBoard's event files
    mlflow = File("mlflow")  # the store of `logging=mlflow` without a server
    comet = File("comet")  # archives of `logging=comet` without a key, one for each attempt
    tracking = File("tracking.json")  # service -> id of the run there that all attempts log to
    index_cache = File("index-cache")  # sample indices that Megatron builds for a dataset
    lock = File("write.lock")  # who writes here now (runs/lock.py)
    disk_full = File("disk.full")  # empty, as it must fit on a full disk: run.json lacks the last attempt's end
    script = File("job.sbatch")  # the sbatch script of the run's job
    submission = File("submission.json")  # command, time and job ids of `tpi submit`
    excluded = File("job.excluded")  # for the job's script: nodes that it is queued again without, one a line
    ended = File("job.ended")  # for the job's script: how the last attempt ended (`Over.word`)

    def is_empty(self) -> bool:
        """Whether a command may begin here: nothing is there, or what one left that was killed before `run.json`."""
        there = {file.name for file in self.path.iterdir()} if self.path.exists() else set()
        before_run = {file.name for file in (self.lock, self.config, self.environment, self.versions)}
        hidden = (UNFINISHED, ".secret")  # the latter: of the nodes of a job (multinode/rendezvous.py)
        started = {name for name in there if name in before_run or (name.startswith(".") and name.endswith(hidden))}
        return not there or (self.lock.name in there and there == started)

    def rank_log(self, rank: int) -> Path:
        """Return standard output and error of one rank."""
        return self.logs / f"rank-{rank}.log"

    def failure(self, rank: int) -> Path:
        """Why a rank failed, as it reports itself."""
        return self.logs / f"rank-{rank}.error.json"

    def read_config(self, kind: Any = dict[str, Any]) -> Any:
        """Return the composed tree, as this type. Raises RunError when this is not a run directory."""
        return self._read(self.config, parse_yaml, kind, run_files.LARGEST_CONFIG)

    def read_run_config(self) -> RunConfig:
        """Return the configuration of the run. Raises RunError when this is not a run directory of this version."""
        try:
            return RunConfig(self.read_config())
        except (AttributeError, TypeError) as error:
            raise RunError(f"{self.path}: {self.config.name} is not of this version of tpi: {error}") from error

    @overload
    def read_run(self) -> dict[str, Any]: ...
    @overload
    def read_run[T](self, kind: type[T]) -> T: ...

    def read_run(self, kind: Any = dict[str, Any]) -> Any:
        """Return what `run.json` holds, as this type. Raises RunError when this is not a run directory."""
        return self._read(self.run, parse_json, kind)

    def tracked(self) -> dict[str, str]:
        """Return what `tracking.json` holds; empty: nothing has been logged. Raises RunError: it is damaged."""
        return self._read(self.tracking, parse_json, dict[str, str]) if self.tracking.exists() else {}

    def read_environment(self) -> dict[str, str]:
        """Return the variables that numerics depend on. Raises RunError when this is not a run directory."""
        return self._read(self.environment, parse_json, run_files.Environment)

    def write(self, file: Path, data: Any) -> None:
        """Write one of the files above, whole or not at all. Raises RunError when it cannot be written."""
        self.write_text(file, text_of(file, data.as_json() if isinstance(data, Record) else data))

    def write_text(self, file: Path, text: str) -> None:
        """Write a file of text, whole or not at all. Raises RunError when it cannot be written."""
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text)

    def _read(self, file: Path, parse: Callable[[bytes], Any], kind: Any = Any, limit: int = run_files.LARGEST) -> Any:
        try:
            return checked(kind, parse(read_limited(file, limit)))
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path} is not a run directory: {file.name}: {reason(error)}") from error


def text_of(file: Path, data: Any) -> str:
    """Return what `RunDir.write` writes there."""
    if file.suffix == ".json":
        return json.dumps(data, indent=2) + "\n"
    import yaml  # here only: most commands write no YAML

    return yaml.safe_dump(data, sort_keys=False)


@contextmanager
def writing(file: Path, elsewhere: str = "run.dir=PATH") -> Iterator[None]:
    """Write a file in the block, which raises RunError for an OSError. elsewhere: as of `cannot_write`."""
    try:
        yield
    except OSError as error:
        raise RunError(cannot_write(file, error, elsewhere)) from error


def cannot_write(file: Path, error: OSError, elsewhere: str = "run.dir=PATH") -> str:
    """Why a file could not be written; for a full disk, how much is free and what to change: `elsewhere`."""
    if error.errno not in DISK_FULL:
        return f"cannot write {file}: {error.strerror or error}"
    return f"cannot write {file}: the disk is full: {shortage(file.parent, error.errno)}; set {elsewhere}"


def check_free(requested: str | Path, key: str = "run.dir=", taken: str = "") -> Path:
    """Return a directory in which a command may begin. RunError: it holds something, or cannot be written.

    key: names the directory in messages. taken: why one that holds something is none; "": a run may be continued.
    """
    path = Path(requested).expanduser()
    try:
        nearest = next(p for p in (path, *path.absolute().parents) if p.exists())
        wrong = None
        if not nearest.is_dir():
            wrong = " is a file" if nearest == path else f": {nearest} is a file, not a directory"
        elif not os.access(nearest, os.W_OK | os.X_OK):
            wrong = f": {nearest} cannot be written; choose another"
        elif not RunDir(path).is_empty():
            goes_on = f"continue it (--resume {path}) or " if RunDir(path).run.exists() else ""
            wrong = taken or f" is not empty: {goes_on}choose another run.dir"
    except OSError as error:
        wrong = f": {error.strerror}"
    if wrong:
        raise RunError(f"{key}{path}{wrong}")
    return path


def choose(requested: str | None, name: str) -> RunDir:
    """Return the directory of a new run: as requested, or `runs/NAME-DATE-TIME`. RunError: it holds something."""
    if requested is not None:
        return RunDir(check_free(requested))
    name = name.partition("recipe=")[0] + name.partition("recipe=")[2].rpartition(":")[2] if "recipe=" in name else name
    stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = (stem, *(stem.with_name(f"{stem.name}-{n}") for n in range(2, 1000)))
    return RunDir(next(p for p in candidates if not p.exists()))


def choose_for_several(requested: Path | None, name: str) -> Path:
    """Return the directory of several runs: --dir, or `runs/NAME-DATE-TIME`. RunError: it is not an empty directory."""
    if requested is None:
        return choose(None, name).path
    return check_free(
        requested, "--dir ", " is there and is not an empty directory: nothing is overwritten, choose another"
    )
