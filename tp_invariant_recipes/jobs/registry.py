# SPDX-License-Identifier: Apache-2.0
"""The registry of submitted jobs; finds a job by its id, its run's name or its directory.

Every submission adds a line to the user's registry, so that tpi finds a job by its id even if SLURM keeps no accounts.
It also writes `submission.json`, the full description, to its run directory.
"""

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tp_invariant_recipes.errors import RunError, reason
from tp_invariant_recipes.ledger.run_files import LARGEST, JobId, Restart, Restarted
from tp_invariant_recipes.reading import Listed, Record, checked, parse_json, read_limited
from tp_invariant_recipes.runs.run_dir import RunDir, cannot_write
from tp_invariant_recipes.runs.sweep_dir import Name
from tp_invariant_recipes.settings.keys import nearest
from tp_invariant_recipes.start.cache import state_dir

SCHEMA = 1  # the schema version of submission.json

TRAIN, CELL, CELLS, JUDGE = "train", "cell", "cells", "judge"


@dataclass(frozen=True)
class SubmittedJob(Record):
    """A SLURM job."""

    id: JobId
    role: Literal["train", "cells", "judge"]


@dataclass(frozen=True)
class SubmissionFile(Record):
    """`submission.json`, as far as it is read. cells: names of a verify's configurations, in order."""

    schema: Literal[1]
    jobs: Listed[SubmittedJob]
    cells: Listed[Name] = ()


@dataclass(frozen=True)
class RegistryLine(Record):
    """A line of the registry."""

    job: str
    directory: str


_ID = re.compile(r"(?P<job>[0-9]+)(_(?P<task>[0-9]+))?")


@dataclass(frozen=True)
class JobPart:
    """A SLURM job, or one task of an array.

    job, task: its id, and its number in the array; None: it is not in an array.
    role:      "train", "configuration" (of a verify) or "judge".
    run:       the run that it trains; for a judge, the directory of its configurations.
    directory: the submission's directory.
    current:   whether the id still means this job to SLURM. False if a later submission got the same id: on another
               cluster, or on one that was set up anew.
    """

    job: str
    task: str | None
    role: str
    run: RunDir
    directory: Path
    current: bool = True

    @property
    def id(self) -> str:
        """The id in SLURM's form: "12", or "12_0" in an array."""
        return self.job if self.task is None else f"{self.job}_{self.task}"

    @property
    def name(self) -> str:
        """The name of its run: the last part of its directory, for a configuration with the parent directory's name."""
        return f"{self.directory.name}/{self.run.path.name}" if self.role == CELL else self.directory.name

    @property
    def log(self) -> Path:
        """The job's output of all its tries."""
        return self.directory / "logs" / f"job-{self.id}.log"


@dataclass(frozen=True)
class Submission:
    """The result of one `tpi submit`. parts: its jobs, or the requested ones among them."""

    directory: Path
    parts: tuple[JobPart, ...]

    @property
    def judged(self) -> bool:
        """Whether one of its jobs compares the others: it is a verify."""
        return any(part.role == JUDGE for part in self.parts)


def registry() -> Path:
    """Return the file that lists the user's jobs, one {"job": "12", "directory": "/path/of/run"} per line."""
    return state_dir() / "jobs.jsonl"


def remember(directory: Path, ids: Iterable[str]) -> None:
    """Register the jobs of a submission. Raises RunError when the registry cannot be written."""
    lines = "".join(json.dumps(RegistryLine(job, str(directory.resolve())).as_json()) + "\n" for job in ids)
    file = registry()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab", buffering=0) as stream:
            # One write, so that lines of two submissions do not mix. The newline first ends any line that a full disk
            # has cut short.
            stream.write(b"\n" + lines.encode())
    except OSError as error:
        raise RunError(cannot_write(file, error)) from error


def registered() -> list[tuple[str, Path]]:
    """Return the ids and directories of all submitted jobs, oldest first. Raises RunError.

    An id that occurs twice belongs to the later directory: to another cluster, or to one that was set up anew.
    """
    try:
        lines = read_limited(registry(), LARGEST).splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {registry()}: {reason(error)}") from error
    known = []
    for line in lines:
        with suppress(ValueError):  # a torn line: the disk was full
            entry = checked(RegistryLine, parse_json(line))
            known.append((entry.job, Path(entry.directory)))
    return known


def all_submissions() -> list[Submission]:
    """All registered submissions whose directories are there, oldest first."""
    known, submissions = registered(), []
    for directory in dict.fromkeys(directory for _, directory in known):
        with suppress(RunError):
            submissions.append(_read(directory, known))
    return submissions


def find(names: Sequence[str]) -> list[Submission]:
    """Return the submissions that these names mean, each with the named parts.

    Raises RunError that lists all unknown names.

    A name is an id ("12", "12_0" for one task of an array), a run's name (the last part of its directory) or a
    directory that holds a `submission.json`. Digits are an id; a directory of that name is "./12".
    """
    known, problems = registered(), []
    submissions: list[Submission] = []
    for name in names:
        try:
            submissions.append(_named(name, known))
        except RunError as error:
            problems.append(str(error))
    if problems:
        raise RunError("\n".join(problems))
    return list(dict.fromkeys(submissions))


def _named(name: str, known: Sequence[tuple[str, Path]]) -> Submission:
    """Raise RunError."""
    directory = Path(name).expanduser().resolve()
    owners, named = dict(known), list(dict.fromkeys(owner for _, owner in known if owner.name == name))
    if by_id := _ID.fullmatch(name):
        if by_id["job"] not in owners:
            raise RunError(_unknown(f"job {name} was not submitted by tpi from this account", name, known))
        submission = _read(owners[by_id["job"]], known)
        if by_id["task"] is None:
            return submission
        parts = tuple(part for part in submission.parts if part.id == name)
        if not parts:
            there = ", ".join(part.id for part in submission.parts)
            raise RunError(f"job {name} is none of {submission.directory}; its jobs: {there}")
        return replace(submission, parts=parts)
    if RunDir(directory).submission.exists():
        return _read(directory, known)
    if len(named) > 1:
        raise RunError("\n  ".join([f"{name} is the name of {len(named)} runs; say which:", *map(str, named)]))
    if named:
        return _read(named[0], known)
    what = f"{name} was not submitted: there is no submission.json in it" if directory.is_dir() else f"no job {name}"
    raise RunError(_unknown(what, name, known))


def _unknown(what: str, name: str, known: Sequence[tuple[str, Path]]) -> str:
    names = {name for job, directory in known for name in (job, directory.name)}
    return f"{what}{nearest(Path(name).name, names) or '; tpi jobs --all lists what there is'}"


def _read(directory: Path, known: Sequence[tuple[str, Path]]) -> Submission:
    """Return the submission that a directory describes. Raises RunError."""
    file = RunDir(directory).submission
    try:
        contents = checked(SubmissionFile, parse_json(read_limited(file, LARGEST)))
        parts = [part for job in contents.jobs for part in _parts(job, directory, contents.cells)]
        if not parts:
            raise ValueError("it names no job")
    except (OSError, ValueError) as error:
        ids = ",".join(job for job, owner in known if owner == directory)
        slurms = f"; SLURM's own commands take its id: squeue --jobs={ids}" if ids else ""
        raise RunError(f"{file} cannot be read: {reason(error)}{slurms}") from error
    owners = dict(known)
    current = tuple(replace(part, current=owners.get(part.job, directory) == directory) for part in parts)
    return Submission(directory, current)


def _parts(job: SubmittedJob, directory: Path, cells: Sequence[str]) -> list[JobPart]:
    """Return the parts of a job in submission.json."""
    run = RunDir(directory)
    if job.role == CELLS:
        return [JobPart(job.id, str(n), CELL, RunDir(directory / cell), directory) for n, cell in enumerate(cells)]
    # The user may have passed the script to sbatch again; then the newest of those jobs counts.
    ids = [attempt.job.id for attempt in attempts(run) if attempt.job and attempt.job.id] if job.role == TRAIN else []
    return [JobPart(ids[-1] if ids else job.id, None, job.role, run, directory)]


def attempts(run: RunDir) -> tuple[Restart, ...]:
    """Return the attempts at a run in `run.json`; empty without that file."""
    try:
        return run.read_run(Restarted).attempts
    except RunError:
        return ()
