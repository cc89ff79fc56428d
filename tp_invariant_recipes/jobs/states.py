"""The state of a job: from SLURM as long as it knows the job, afterwards from its accounts and the run directory."""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.jobs import slurm_client
from tp_invariant_recipes.jobs.registry import JUDGE, JobPart, Submission, all_submissions, attempts
from tp_invariant_recipes.jobs.slurm_client import Accounted, Queued
from tp_invariant_recipes.ledger.layouts import words
from tp_invariant_recipes.ledger.run_files import Attempt, ProgressLine
from tp_invariant_recipes.reading import checked, open_file, parse_json
from tp_invariant_recipes.runs.matrix_dir import MatrixDir
from tp_invariant_recipes.runs.run_dir import RunDir

COMPLETED, UNKNOWN = "completed", "unknown"

RECENT = 24 * 3600  # seconds
# SLURM's words for jobs that ended by themselves; their run directories say how.
_ENDED_BY_SCRIPT = ("COMPLETED", "FAILED")
_ID_REUSED = "its id is another job's now"
_LAST_BYTES = 4096  # of progress.jsonl: more than two lines


@dataclass(frozen=True)
class SlurmStatus:
    """Rows of the controller and of the accounts. unavailable: why the query failed; None: it succeeded."""

    queued: tuple[Queued, ...] = ()
    accounted: Mapping[str, Accounted] = field(default_factory=dict)
    unavailable: str | None = None

    def queued_row(self, part: JobPart) -> Queued | None:
        """Return the controller's row for a part; None: the controller does not know it, or no longer knows it."""
        rows = self._by_job.get(part.job, ()) if part.current else ()
        if part.task is None:
            return rows[0] if rows else None
        own = next((row for row in rows if row.task == part.task), None)
        return own or next((row for row in rows if row.task and _holds(row.task, int(part.task))), None)

    @cached_property
    def _by_job(self) -> Mapping[str, Sequence[Queued]]:
        rows: dict[str, list[Queued]] = {}
        for row in self.queued:
            rows.setdefault(row.job, []).append(row)
        return rows

    def account(self, part: JobPart) -> Accounted | None:
        """Return the account of a part. Tasks that were cancelled while they waited share one: "12_[0-4]"."""
        if not part.current or part.task is None or part.id in self.accounted:
            return self.accounted.get(part.id) if part.current else None
        several = [id for id in self.accounted if id.startswith(f"{part.job}_[")]
        matches = (id for id in several if _holds(id.partition("_")[2], int(part.task)))
        return next((self.accounted[id] for id in matches), None)


def query(submissions: Sequence[Submission], queued: Iterable[Queued] | None = None) -> SlurmStatus:
    """Return the status of their parts. Raises RunError when SLURM is not installed or does not answer.

    queued: the controller's rows; None: query it.
    """
    parts = [part for submission in submissions for part in submission.parts]
    if queued is None:
        queued = slurm_client.queue(dict.fromkeys(part.job for part in parts if part.current))
    known = SlurmStatus(tuple(queued))
    gone = [part.id for part in parts if part.current and known.queued_row(part) is None]
    return SlurmStatus(known.queued, slurm_client.accounting(gone))


def _holds(listed: str, task: int) -> bool:
    """Whether SLURM's list of tasks contains this one: "0-4", "[0,2-4%2]" or, truncated, "0,2,..."."""
    spans = [span.split("-") for span in re.sub(r"[\[\]]|%.*|\.\.\.", "", listed).split(",") if span]
    return "..." in listed or any(int(span[0]) <= task <= int(span[-1]) for span in spans)


@dataclass(frozen=True)
class End:
    """The end of a part.

    word:        SLURM's, a verify's verdict, or the outcome of the run's last attempt in the job.
    exit_status: 0 completed or identical, 1 different, 2 otherwise.
    settled:     whether it can no longer change. Files may become visible after their job's end.
    note:        further information, such as the reason of a failure.
    """

    word: str
    exit_status: int
    settled: bool
    note: str | None


@dataclass(frozen=True)
class JobState:
    """The state of one part of a submission.

    word:         SLURM's ("RUNNING") or, after the end, the end's.
    alive:        whether it runs or waits; None: SLURM cannot be queried, and the run directory does not tell.
    end:          None: it has not ended.
    tries:        the number of starts by SLURM, as far as the run directory shows.
    layouts:      of each try so far, oldest first: "tp=2 dp=4" and so on, degrees of 1 left out.
    step, last_step: the last recorded step, and the last planned step; None: unknown.
    reason:       SLURM's reason why it is pending; None: no reason.
    seconds_remaining: of this try's time limit.
    """

    part: JobPart
    word: str
    tries: int
    step: int | None
    last_step: int | None
    loss: float | None
    nodes: tuple[str, ...]
    alive: bool | None = True
    end: End | None = None
    reason: str | None = None
    seconds_remaining: int | None = None
    note: str | None = None
    layouts: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int | None:
        """The exit status of its end; None: it has not ended."""
        return self.end.exit_status if self.end else None

    @property
    def spelt(self) -> str:
        """The state for people: SLURM's words and tpi's in one spelling, lower case."""
        return self.word.lower().replace("_", " ")

    @property
    def text(self) -> str:
        """The state in a few words, such as "running try 2" or "pending (Resources)"."""
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.spelt}{reason}" + (f" try {self.tries}" if self.alive and self.tries > 1 else "")

    def as_dict(self) -> dict[str, Any]:
        """Return the state as JSON; documented in `tpi jobs --help`."""
        return {
            "job": self.part.id,
            "role": self.part.role,
            "run": self.part.name,
            "directory": str(self.part.run.path),
            "log": str(self.part.log),
            "state": self.word,
            "reason": self.reason,
            "alive": self.alive,
            "exit_status": self.exit_status,
            "tries": self.tries,
            "layouts": list(self.layouts),
            "step": self.step,
            "of": self.last_step,
            "loss": self.loss,
            "seconds_left": self.seconds_remaining,
            "nodes": list(self.nodes),
            "note": self.note,
        }


@dataclass(frozen=True)
class Overview:
    """The states of several submissions. unavailable: why SLURM could not be queried; then some states are unknown."""

    states: tuple[list[JobState], ...]
    unavailable: str | None


def overview(submissions: Sequence[Submission], known: SlurmStatus | None = None) -> Overview:
    """Return the states of these submissions, with or without SLURM. known: SLURM's status; None: query it."""
    status = known or SlurmStatus()
    if status.unavailable is None:
        try:
            status = query(submissions, known.queued if known else None)
        except RunError as error:
            status = SlurmStatus(unavailable=str(error))
    return Overview(tuple(states(submission, status) for submission in submissions), status.unavailable)


def overview_of_recent(*, everything: bool = False) -> Overview:
    """Return the states of the submissions in the queue or with changes in the last day; with `everything`, of all.

    For submissions without their directories, only SLURM's information.
    """
    try:
        known = SlurmStatus(tuple(slurm_client.queue()))  # of this user; no accounts
    except RunError as error:
        known = SlurmStatus(unavailable=str(error))

    def wanted(submission: Submission) -> bool:
        queued = any(known.queued_row(part) for part in submission.parts)
        return queued or (submission.note is None and (everything or _recent(submission)))

    return overview([submission for submission in all_submissions() if wanted(submission)], known)


def _recent(submission: Submission) -> bool:
    runs = {RunDir(submission.directory), *(part.run for part in submission.parts)}
    files = [file for run in runs for file in (run.submission, run.run, run.progress)]
    return any(file.exists() and time.time() - file.stat().st_mtime < RECENT for file in files)


def now(submissions: Sequence[Submission]) -> list[list[JobState]]:
    """Return the states of the parts of each. Raises RunError when SLURM is not installed or does not answer."""
    status = query(submissions)
    return [states(submission, status) for submission in submissions]


def states(submission: Submission, status: SlurmStatus) -> list[JobState]:
    """Return the states of a submission's parts."""
    part_states = [_state(part, status) for part in submission.parts]
    return [replace(state, note=submission.note) for state in part_states] if submission.note else part_states


def cancel(submissions: Sequence[Submission]) -> list[list[JobState]]:
    """Cancel all running and waiting jobs of these; returns their previous states. Raises RunError without SLURM."""
    before = now(submissions)
    alive = [
        (submission, state.part)
        for submission, part_states in zip(submissions, before, strict=True)
        for state in part_states
        if state.alive
    ]
    # Cancel the judge first: it waits for the end of the others, and would start. A whole array is cancelled by its
    # own id.
    alive.sort(key=lambda pair: pair[1].role != JUDGE)
    slurm_client.cancel(dict.fromkeys(part.job if submission.judge else part.id for submission, part in alive))
    return before


def exit_status(part_states: Sequence[JobState]) -> int | None:
    """Return a submission's exit status from its parts': the judge's, or the worst; None: it has not ended."""
    if any(state.exit_status is None for state in part_states):
        return None
    judged = [state for state in part_states if state.part.role == JUDGE]
    return max(state.exit_status or 0 for state in judged or part_states)


def _state(part: JobPart, status: SlurmStatus) -> JobState:
    queued, accounted = status.queued_row(part), status.account(part)
    tried = [attempt for attempt in attempts(part.run) if attempt.job]
    last = tried[-1] if tried else None
    facts = _facts(part, tried, queued.nodes if queued else ())
    if queued is not None and not queued.over:
        return _alive(facts, queued)
    word = queued.state if queued else accounted.state if accounted else None
    if word not in slurm_client.OVER:
        word = None  # SLURM writes the accounts some time after the end
    ended = _judged(part, word) if part.role == JUDGE else _ended(part, word, last)
    if status.unavailable is not None and (not ended.settled or (last and last.requeued)):
        return JobState(**facts, word=UNKNOWN, alive=None)
    return JobState(**facts, word=ended.word, alive=False, end=ended, note=ended.note)


def _alive(facts: dict[str, Any], queued: Queued) -> JobState:
    """Return the state of a job in SLURM's queue."""
    reason = queued.reason if queued.state == "PENDING" and queued.reason not in ("", "None") else None
    return JobState(**facts, word=queued.state, reason=reason, seconds_remaining=queued.seconds_remaining)


def _facts(part: JobPart, tried: Sequence[Attempt], nodes: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a JobState that the run's own files tell. tried: its attempts by jobs, in order."""
    last = tried[-1] if tried else None
    step, loss = _last_step(part.run.progress)
    return {
        "part": part,
        "tries": 1 + last.job.restart if last and last.job else 1,
        "layouts": tuple(words(attempt.layout) for attempt in tried if attempt.layout),
        "step": step,
        "last_step": last.to_step if last else None,
        "loss": loss,
        "nodes": nodes,
    }


def _ended(part: JobPart, word: str | None, last: Attempt | None) -> End:
    """Return the end of a run whose job SLURM no longer knows. word: SLURM's; last: the last attempt by a job."""
    if last is None or last.outcome is None:
        text = _with_log(part, "it recorded no exit status" if last else "it recorded no start")
        settled = word not in (None, *_ENDED_BY_SCRIPT)
        return End(
            word or UNKNOWN, 0 if word == "COMPLETED" else 2, settled, text if part.current else f"{_ID_REUSED}; {text}"
        )
    settled, note = True, last.why
    if last.requeued:  # unless it was cancelled, SLURM has started another try, whose end is still to come
        settled = word not in (None, *_ENDED_BY_SCRIPT)
        note = "; ".join(filter(None, (note, "it was to be queued again, and is in the queue no more")))
    return End(word or last.outcome, 0 if last.outcome == COMPLETED else 2, settled, note)


def _judged(part: JobPart, word: str | None) -> End:
    """Return the end of a judge whose job SLURM no longer knows, from the files that it wrote."""
    try:
        result = MatrixDir(part.directory).read_result()
        return End(result.verdict, result.exit_status, True, result.text)
    except RunError:
        settled = word not in (None, *_ENDED_BY_SCRIPT)
        return End(word or UNKNOWN, 2, settled, _with_log(part, "it left no verdict"))


def _with_log(part: JobPart, words: str) -> str:
    return f"{words}; its log: {part.log}" if part.log.exists() else f"{words}, and no log"


def _last_step(file: Path) -> tuple[int | None, float | None]:
    """Return number and loss of the last whole step in a progress file."""
    try:
        with open_file(file) as stream:
            stream.seek(max(0, file.stat().st_size - _LAST_BYTES))
            lines = stream.read().rpartition(b"\n")[0].splitlines()
        line = checked(ProgressLine, parse_json(lines[-1], constants=True))
        return line.step, line.loss
    except (OSError, ValueError, IndexError):
        return None, None
