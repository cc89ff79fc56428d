# SPDX-License-Identifier: Apache-2.0
"""The state of a job: of SLURM while it knows the job, later of its accounts and the run directory; and its logs."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.jobs import slurm_client
from tp_invariant_recipes.jobs.registry import JUDGE, JobPart, Submission, all_submissions, attempts
from tp_invariant_recipes.jobs.slurm_client import Queued
from tp_invariant_recipes.ledger.run_files import ProgressLine, Restart
from tp_invariant_recipes.reading import Appended, checked, open_file, parse_json
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.runs.sweep_dir import SweepDir
from tp_invariant_recipes.text import single_line, visible

COMPLETED, UNKNOWN = "completed", "unknown"
RECENT = 24 * 3600  # seconds
PAUSE = 5.0  # seconds between two queries to the controller
SETTLE = 15.0  # seconds after a job's end within which the last bytes of its node are visible here
LOOK = 0.5  # seconds between two looks
# SLURM's words for jobs that ended by themselves; their run directories say how.
_ENDED_BY_SCRIPT = ("COMPLETED", "FAILED")
_LAST_BYTES = 4096  # of progress.jsonl: more than two lines


@dataclass(frozen=True)
class JobState:
    """The state of one part of a submission.

    word:         SLURM's ("RUNNING") or, after the end, SLURM's, a verify's verdict, or the last attempt's outcome.
    alive:        whether it runs or waits; None: SLURM cannot be queried, and the run directory does not tell.
    exit_status:  0 completed or identical, 1 different, 2 otherwise; None: it has not ended.
    settled:      whether an end can no longer change. Files may become visible after their job's end.
    tries:        the number of starts by SLURM, as far as the run directory shows.
    step, last_step: the last recorded step, and the last planned step; None: unknown.
    reason:       SLURM's reason why it is pending; None: no reason.
    seconds_remaining: of this try's time limit.
    note:         further information about an end, such as the reason of a failure.
    """

    part: JobPart
    word: str
    tries: int
    step: int | None
    last_step: int | None
    loss: float | None
    nodes: str
    alive: bool | None = True
    exit_status: int | None = None
    settled: bool = False
    reason: str | None = None
    seconds_remaining: int | None = None
    note: str | None = None

    @property
    def spelt(self) -> str:
        """The state for people: SLURM's words and tpi's in one spelling, lower case."""
        return self.word.lower().replace("_", " ")

    @property
    def text(self) -> str:
        """The state in a few words, such as "running start 2" or "pending (Resources)"."""
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.spelt}{reason}" + (f" start {self.tries}" if self.alive and self.tries > 1 else "")

    def __str__(self) -> str:
        """12 qwen3_8b-tp4: running."""
        return f"{self.part.id} {self.part.name}: {self.text}"

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
            "step": self.step,
            "of": self.last_step,
            "loss": self.loss,
            "seconds_left": self.seconds_remaining,
            "nodes": self.nodes,
            "note": self.note,
        }


def overview(
    submissions: Sequence[Submission] | None = None, *, everything: bool = False
) -> tuple[list[JobState], str | None]:
    """Return the states of these submissions' parts, and why SLURM could not be queried; None: it answered.

    submissions: None: of those in the queue or with changes in the last day; with `everything`, of all.
    """
    queued, unavailable = None, None
    try:
        queued = slurm_client.queue()
    except RunError as error:
        unavailable = str(error)
    if submissions is None:
        there = {*(queued or ())}
        submissions = [
            submission
            for submission in all_submissions()
            if everything or _recent(submission) or any(part.current and part.id in there for part in submission.parts)
        ]
    return list(chain.from_iterable(_states(submissions, queued))), unavailable


def _recent(submission: Submission) -> bool:
    runs = {RunDir(submission.directory), *(part.run for part in submission.parts)}
    files = [file for run in runs for file in (run.submission, run.run, run.progress)]
    return any(file.exists() and time.time() - file.stat().st_mtime < RECENT for file in files)


def now(submissions: Sequence[Submission]) -> list[list[JobState]]:
    """Return the states of the parts of each. Raises RunError when SLURM is not installed or does not answer."""
    return _states(submissions, slurm_client.queue())


def _states(submissions: Sequence[Submission], queued: Mapping[str, Queued] | None) -> list[list[JobState]]:
    """queued: what the controller says, by ids; None: it cannot be queried, nor are the accounts then."""
    ids = [part.id for submission in submissions for part in submission.parts if part.current]
    accounted = {} if queued is None else slurm_client.accounting(id_ for id_ in ids if id_ not in queued)
    return [[_state(part, queued, accounted) for part in submission.parts] for submission in submissions]


def cancel(submissions: Sequence[Submission]) -> list[JobState]:
    """Cancel all running and waiting jobs of these; returns their previous states. Raises RunError without SLURM."""
    before = now(submissions)
    # The judge first: it waits for the end of the others, and would start. A whole array is cancelled by its own id.
    alive = [
        (state.part.role != JUDGE, state.part.job if submission.judged else state.part.id)
        for submission, states in zip(submissions, before, strict=True)
        for state in states
        if state.alive
    ]
    slurm_client.cancel(dict.fromkeys(job for _, job in sorted(alive)))
    return [state for states in before for state in states]


def exit_status(states: Sequence[JobState]) -> int | None:
    """Return a submission's exit status from its parts': the judge's, or the worst; None: it has not ended."""
    if any(state.exit_status is None for state in states):
        return None
    judged = [state for state in states if state.part.role == JUDGE]
    return max(state.exit_status or 0 for state in judged or states)


def _state(part: JobPart, queue: Mapping[str, Queued] | None, accounted: Mapping[str, str]) -> JobState:
    """Return the state of a part. SLURM says nothing of one whose id is another job's now."""
    queued = queue.get(part.id) if queue and part.current else None
    tried = [attempt for attempt in attempts(part.run) if attempt.job]
    last = tried[-1] if tried else None
    step, loss = _last_step(part.run.progress)
    state = JobState(
        part,
        queued.state if queued else UNKNOWN,
        tries=1 + last.job.restart if last and last.job else 1,
        step=step,
        last_step=last.to_step if last else None,
        loss=loss,
        nodes=queued.nodes if queued else "",
    )
    if queued is not None and not queued.over:
        reason = queued.reason if queued.state == "PENDING" and queued.reason not in ("", "None") else None
        return replace(state, reason=reason, seconds_remaining=queued.seconds_remaining)
    word = queued.state if queued else accounted.get(part.id) if part.current else None
    if word not in slurm_client.OVER:
        word = None  # SLURM writes the accounts some time after the end
    ended = replace(state, word=word or UNKNOWN, alive=False, settled=word not in (None, *_ENDED_BY_SCRIPT))
    ended = _judged(ended) if part.role == JUDGE else _ended(ended, last)
    if queue is None and (not ended.settled or (last and last.requeued)):
        return replace(state, alive=None)
    return ended


def _ended(state: JobState, last: Restart | None) -> JobState:
    """Complete the state of a run whose job SLURM no longer knows. last: the last attempt by a job."""
    if last is None or last.outcome is None:
        note = _with_log(state.part, "it recorded no exit status" if last else "it recorded no start")
        note = note if state.part.current else f"its id is another job's now; {note}"
        return replace(state, exit_status=0 if state.word == COMPLETED.upper() else 2, note=note)
    # Unless it was cancelled, SLURM has started another try of a requeued job, whose end is still to come.
    lost = "it was to be queued again, and is in the queue no more" if last.requeued else None
    return replace(
        state,
        word=last.outcome if state.word == UNKNOWN else state.word,
        exit_status=0 if last.outcome == COMPLETED else 2,
        settled=state.settled or not last.requeued,
        note="; ".join(filter(None, (last.why, lost))) or None,
    )


def _judged(state: JobState) -> JobState:
    """Complete the state of a judge whose job SLURM no longer knows, from the files that it wrote."""
    try:
        result = SweepDir(state.part.directory).read_result()
    except RunError:
        return replace(state, exit_status=2, note=_with_log(state.part, "it left no verdict"))
    return replace(state, word=result.verdict, exit_status=result.exit_status, settled=True, note=result.text)


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


def watch(submissions: Sequence[Submission], report: Callable[[str], None]) -> Iterator[list[list[JobState]]]:
    """Yield the states of each, every LOOK seconds, until all have ended. A requeued job has not. Changes no job.

    report: called with one line per change. Raises RunError when the first query fails.
    """
    states: list[list[JobState]] = []
    reported: dict[str, str] = {}
    asked, ended, away = float("-inf"), None, False
    while True:
        if time.monotonic() - asked >= (LOOK if ended else PAUSE):
            asked = time.monotonic()
            try:
                states, away = now(submissions), False
            except RunError as error:
                if not states:
                    raise
                if not away:  # jobs continue while the controller is temporarily unavailable
                    report(f"no answer, asking again and again: {error}")
                away = True
            alive = [state for each in states for state in each if state.exit_status is None]
            for state in alive:
                if reported.get(state.part.id) != state.text:
                    on = f" on {state.nodes}" if state.word == "RUNNING" and state.nodes else ""
                    report(f"{state}{on}")
            reported = {state.part.id: state.text for state in alive}
            ended = None if alive else ended or time.monotonic()
        yield states
        settled = all(state.settled for each in states for state in each)
        if ended is not None and (settled or time.monotonic() - ended > SETTLE):
            return
        time.sleep(LOOK)


class Tails:
    """Copies text appended to jobs' logs to an output."""

    def __init__(self, parts: Sequence[JobPart], out: BinaryIO) -> None:
        """parts: the jobs, whose logs need not exist yet."""
        self.out = out
        self._logs = [(part, Appended(part.log)) for part in parts]
        self._shown: JobPart | None = None

    def __call__(self, *, last: bool = False) -> bool:
        """Write new whole lines; with `last` also incomplete ones. Returns whether there was anything to write."""
        return any([self._show(part, log, last) for part, log in self._logs])

    def _show(self, part: JobPart, log: Appended, last: bool) -> bool:
        try:
            whole = log.read(lines=not last)
        except OSError as error:
            raise RunError(f"cannot read {part.log}: {error.strerror}") from error
        if whole and len(self._logs) > 1 and self._shown is not part:
            heading = f"==> {single_line(part.name)} <==\n"
            self.out.write(f"{'' if self._shown is None else chr(10)}{heading}".encode())
        if whole:  # a progress bar that overwrites itself becomes one line for each state
            self._shown = part
            text = whole.decode("utf-8", "backslashreplace").replace("\r\n", "\n").replace("\r", "\n")
            self.out.write(visible(text).encode())
            self.out.flush()
        return bool(whole)


def show(submission: Submission, out: BinaryIO) -> None:
    """Write the current output of its jobs. Raises RunError, with the state of the jobs, when there is none."""
    parts = submission.parts
    if any(part.log.exists() for part in parts):
        Tails(parts, out)(last=True)
        return
    known, unavailable = overview([submission])
    missing = f"{parts[0].log} is not there" if len(parts) == 1 else f"no log of {submission.directory.name} is there"
    lines = [f"{missing} yet; -f waits for it"]
    lines += [f"{s.part.id}: {s.text}" + (f": {s.note}" if s.note else "") for s in known]
    raise RunError("\n".join([*lines, *([unavailable] if unavailable else [])]))


def follow(
    submission: Submission, out: BinaryIO, report: Callable[[str], None], reader_gone: Callable[[], bool]
) -> list[JobState] | None:
    """Write the output of its jobs until they have ended; returns the last states. Raises RunError like `watch`.

    reader_gone: whether nobody reads `out` any more; then it ends at once and returns None.
    """
    tails, last = Tails(submission.parts, out), []
    for (last,) in watch([submission], report):  # noqa: B007  those of the end are returned
        tails()
        if reader_gone():
            return None
    tails(last=True)
    return last
