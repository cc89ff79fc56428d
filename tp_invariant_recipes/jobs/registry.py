"""The registry of submitted jobs; finds a job by its id, its run's name or its directory.

Every submission adds a line to the user's registry, so that tpi finds a job by its id even if SLURM keeps no accounts.
It also writes `submission.json`, the full description, to its run directory.
"""

import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tp_invariant_recipes.errors import RunError, reason
from tp_invariant_recipes.ledger.run_files import LARGEST, Attempt, Attempted
from tp_invariant_recipes.reading import Listed, Record, checked, parse_json, read_limited
from tp_invariant_recipes.runs.matrix_dir import Name
from tp_invariant_recipes.runs.run_dir import RunDir, cannot_write
from tp_invariant_recipes.settings.nearest import nearest
from tp_invariant_recipes.start.cache import state_dir

SCHEMA = 1  # the schema version of submission.json

TRAIN, CELL, CELLS, JUDGE = "train", "cell", "cells", "judge"


@dataclass(frozen=True)
class SubmittedJob(Record):
    """A SLURM job."""

    id: str
    role: Literal["train", "cells", "judge"]


@dataclass(frozen=True)
class SubmissionFile(Record):
    """`submission.json`, as far as it is read. cells: names of a verify's cells, in order."""

    schema: int
    jobs: Listed[SubmittedJob]
    cells: Listed[Name] = ()


_ID = re.compile(r"(?P<job>[0-9]+)(_(?P<task>[0-9]+))?")


@dataclass(frozen=True)
class JobPart:
    """A SLURM job, or one task of an array.

    job, task: its id, and its number in the array; None: it is not in an array.
    role:      "train", "cell" (of a verify) or "judge".
    run:       the run that it trains; for a judge, the directory of its cells.
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
        """The name of its run: the last part of its directory, for a cell with the parent directory's name."""
        return f"{self.directory.name}/{self.run.path.name}" if self.role == CELL else self.directory.name

    @property
    def log(self) -> Path:
        """The job's output of all its tries."""
        return self.directory / "logs" / f"job-{self.id}.log"


@dataclass(frozen=True)
class Submission:
    """The result of one `tpi submit`. parts: its jobs, or the requested ones among them.

    note: why only its ids are known; None otherwise.
    """

    directory: Path
    parts: tuple[JobPart, ...]
    note: str | None = None

    @property
    def name(self) -> str:
        """The last part of its directory."""
        return self.directory.name

    @property
    def judge(self) -> JobPart | None:
        """The job that compares; only a verify has one."""
        return next((part for part in self.parts if part.role == JUDGE), None)


def registry() -> Path:
    """Return the file that lists the user's jobs, one {"job": "12", "directory": "/path/of/run"} per line."""
    return state_dir() / "jobs.jsonl"


def remember(directory: Path, ids: Iterable[str]) -> None:
    """Register the jobs of a submission. Raises RunError when the registry cannot be written."""
    where = str(directory.resolve())
    lines = "".join(json.dumps({"job": job, "directory": where}) + "\n" for job in ids)
    file = registry()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            # One write, so that lines of two submissions do not mix. The newline first ends any line that a full disk
            # has cut short.
            os.write(descriptor, b"\n" + lines.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RunError(cannot_write(file, error)) from error


@dataclass(frozen=True)
class Registered:
    """The contents of the registry: one (job id, directory) per line, oldest first."""

    lines: tuple[tuple[str, Path], ...]

    @cached_property
    def owners(self) -> dict[str, Path]:
        """The directory of every id; the later one if an id occurs twice."""
        return dict(self.lines)

    @cached_property
    def directories(self) -> list[Path]:
        """The directories of all submissions, oldest first."""
        return list(dict.fromkeys(directory for _, directory in self.lines))


def registered() -> Registered:
    """All whole lines; empty without a registry. Raises RunError when it cannot be read."""
    try:
        lines = read_limited(registry(), LARGEST).splitlines()
    except FileNotFoundError:
        return Registered(())
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {registry()}: {getattr(error, 'strerror', None) or error}") from error
    entries = []
    for line in lines:
        with suppress(ValueError):  # a torn line: the disk was full
            entries.append(_entry(parse_json(line)))
    return Registered(tuple(entries))


def _entry(line: Any) -> tuple[str, Path]:
    """Return a job's id and directory. ValueError."""
    job, directory = (line.get("job"), line.get("directory")) if isinstance(line, dict) else (None, None)
    if not isinstance(job, str) or not isinstance(directory, str):
        raise ValueError("no line of the registry")
    return job, Path(directory)


def all_submissions() -> list[Submission]:
    """All registered submissions, oldest first, with or without their directories."""
    known = registered()
    return [_submission(directory, known) for directory in known.directories]


def find(names: Sequence[str]) -> list[Submission]:
    """Return the submissions that these names mean, each with the named parts.

    Raises RunError that lists all unknown names.

    A name is an id ("12", "12_0" for one task of an array), a run's name (the last part of its directory) or a
    directory that holds a `submission.json`. Digits are an id; a directory of that name is "./12".
    """
    known = registered()
    submissions: list[Submission] = []
    problems = []
    for name in names:
        try:
            submission = _named_submission(name, known)
        except RunError as error:
            problems.append(str(error))
        else:
            if submission not in submissions:
                submissions.append(submission)
    if problems:
        raise RunError("\n".join(problems))
    return submissions


def of_cell(submission: Submission, cell: str) -> Submission:
    """Return the submission with only the job of one cell. Raises RunError: it has no such cell."""
    parts = tuple(part for part in submission.parts if part.role == CELL and part.run.path.name == cell)
    if not parts:
        cells = [part.run.path.name for part in submission.parts if part.role == CELL]
        hint = nearest(cell, cells) if cells else "; it is no tpi submit --verify"
        raise RunError(f"{submission.name} has no cell {cell}{hint}")
    return replace(submission, parts=parts)


def _named_submission(name: str, known: Registered) -> Submission:
    """Raise RunError."""
    by_id = _ID.fullmatch(name)
    if by_id:
        if by_id["job"] in known.owners:
            return _narrowed(_submission(known.owners[by_id["job"]], known), by_id["job"], by_id["task"])
        raise RunError(_unknown(f"job {name} was not submitted by tpi from this account", name, known))
    directory = Path(name).expanduser().resolve()
    if RunDir(directory).submission.exists():
        return _read(directory, known)
    named = [directory for directory in known.directories if directory.name == name]
    if len(named) > 1:
        lines = [f"{name} is the name of {len(named)} runs; say which:", *(f"  {directory}" for directory in named)]
        raise RunError("\n".join(lines))
    if named:
        return _submission(named[0], known)
    what = f"{name} was not submitted: there is no submission.json in it" if directory.is_dir() else f"no job {name}"
    raise RunError(_unknown(what, name, known))


def _unknown(what: str, name: str, known: Registered) -> str:
    names = {*known.owners, *(directory.name for directory in known.directories)}
    return f"{what}{nearest(Path(name).name, names) or '; tpi jobs --all lists what there is'}"


def _narrowed(submission: Submission, job: str, task: str | None) -> Submission:
    """Return the submission with only this task; without a task, the whole submission."""
    if task is None:
        return submission
    parts = tuple(part for part in submission.parts if (part.job, part.task) == (job, task))
    if not parts:
        there = ", ".join(part.id for part in submission.parts)
        raise RunError(f"job {job}_{task} is none of {submission.directory}; its jobs: {there}")
    return replace(submission, parts=parts)


def _submission(directory: Path, known: Registered) -> Submission:
    """Return the submission as its directory describes it or, if that is gone, as the registry does."""
    try:
        return _read(directory, known)
    except RunError as error:
        run = RunDir(directory)
        ids = [job for job, owner in known.owners.items() if owner == directory]
        note = str(error) if directory.is_dir() else f"{directory} is gone"
        return Submission(directory, tuple(JobPart(job, None, TRAIN, run, directory) for job in ids), note)


def _read(directory: Path, known: Registered) -> Submission:
    """Raise RunError."""
    file = RunDir(directory).submission
    try:
        contents = checked(SubmissionFile, parse_json(read_limited(file, LARGEST)))
        if contents.schema != SCHEMA:
            raise ValueError(f"its schema is {contents.schema}, and this version reads {SCHEMA}")
        parts = [part for job in contents.jobs for part in _parts(job, directory, contents.cells)]
        if not parts:
            raise ValueError("it names no job: tpi submit has not got as far")
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read: {reason(error)}") from error
    owners = known.owners
    parts = [replace(part, current=owners.get(part.job, directory) == directory) for part in parts]
    return Submission(directory, tuple(parts))


def _parts(job: SubmittedJob, directory: Path, cells: Sequence[str]) -> list[JobPart]:
    """Return the parts of a job in submission.json."""
    run = RunDir(directory)
    if job.role == CELLS:
        return [JobPart(job.id, str(n), CELL, RunDir(directory / cell), directory) for n, cell in enumerate(cells)]
    if job.role == JUDGE:
        return [JobPart(job.id, None, JUDGE, run, directory)]
    # The user may have passed the script to sbatch again; then the newest of those jobs counts.
    ids = [attempt.job.id for attempt in attempts(run) if attempt.job and attempt.job.id]
    return [JobPart(ids[-1] if ids else job.id, None, TRAIN, run, directory)]


def attempts(run: RunDir) -> tuple[Attempt, ...]:
    """Return the attempts at a run in `run.json`; empty without that file."""
    try:
        return run.read_run(Attempted).attempts
    except RunError:
        return ()
