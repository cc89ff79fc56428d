"""Waits for jobs and shows what they print. Stopping or killing this changes no job."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.foreign_text import single_line, visible
from tp_invariant_recipes.jobs import states
from tp_invariant_recipes.jobs.registry import JUDGE, Submission
from tp_invariant_recipes.jobs.states import JobState
from tp_invariant_recipes.reading import open_file

FIRST_PAUSE, LONGEST_PAUSE = 2.0, 15.0  # seconds between two queries to the controller
SLOWER = 1.25  # the factor by which the pause grows while nothing changes
SETTLE = 15.0  # seconds after a job's end within which the last bytes of its node are visible here
LOOK = 0.5  # seconds between two looks at the files


@dataclass
class SubmissionWatch:
    """Queries the controller about submissions, less and less often while nothing changes.

    report: called with one line per change.
    states: from the last answer, a list for each submission.
    """

    submissions: Sequence[Submission]
    report: Callable[[str], None]
    states: list[list[JobState]] = field(default_factory=list)
    _pause: float = 0.0
    _next: float = 0.0
    _ended: float | None = None
    _reported: dict[str, str] = field(default_factory=dict)
    _unavailable: bool = False

    def __call__(self) -> bool:
        """Query SLURM after the pause. Returns whether all have ended. Raises RunError when the first query fails."""
        if time.monotonic() >= self._next:
            self._ask()
            self._next = time.monotonic() + (LOOK if self._ended else self._pause)
        if self._ended is None:
            return False
        settled = all(state.end and state.end.settled for submission in self.states for state in submission)
        return settled or time.monotonic() - self._ended > SETTLE

    def _ask(self) -> None:
        try:
            self.states = states.now(self.submissions)
        except RunError as error:
            if not self.states:
                raise
            if not self._unavailable:  # jobs continue while the controller is temporarily unavailable
                self.report(f"no answer, asking again and again: {error}")
            self._unavailable = True
            return
        self._unavailable = False
        self._report_changes([state for submission in self.states for state in submission if state.alive])
        if all(state.end for submission in self.states for state in submission):
            self._ended = self._ended or time.monotonic()
        else:
            self._ended = None

    def _report_changes(self, alive: Sequence[JobState]) -> None:
        news = {state.part.id: state.text for state in alive}
        fresh = [state for state in alive if self._reported.get(state.part.id) != state.text]
        for state in fresh:
            on = f" on {', '.join(state.nodes)}" if state.word == "RUNNING" and state.nodes else ""
            self.report(f"{state.part.id} {state.part.name}: {state.text}{on}")
        self._pause = FIRST_PAUSE if news != self._reported else min(LONGEST_PAUSE, self._pause * SLOWER)
        self._reported = news


def wait(
    submissions: Sequence[Submission], report: Callable[[str], None], timeout: float | None = None
) -> list[list[JobState]]:
    """Wait until all have ended; returns the states of each. A requeued job has not ended.

    report: called with each change. timeout: in seconds; after it RunError, as when SLURM does not answer.
    """
    watch, until = SubmissionWatch(submissions, report), None if timeout is None else time.monotonic() + timeout
    while not watch():
        if until is not None and time.monotonic() >= until:
            alive = [state for submission in watch.states for state in submission if not state.end]
            going = "\n".join(f"  {state.part.id} {state.part.name}: {state.text}" for state in alive)
            raise RunError(f"not ended after {timeout:g} s:\n{going}" if going else f"not ended after {timeout:g} s")
        time.sleep(LOOK)
    return watch.states


@dataclass(frozen=True)
class LogSource:
    """A file to show, which need not exist yet. label: its heading among several files."""

    label: str
    file: Path


@dataclass
class Tails:
    """Copies text appended to files to an output. A replaced or shortened file starts from its beginning."""

    sources: Sequence[LogSource]
    out: BinaryIO
    _positions: dict[Path, tuple[int, int]] = field(default_factory=dict)  # inode and position
    _shown: LogSource | None = None

    def __call__(self, *, last: bool = False) -> bool:
        """Write new whole lines; with `last` also incomplete ones. Returns whether there was anything to write."""
        return any([self._show(source, last) for source in self.sources])

    def _show(self, source: LogSource, last: bool) -> bool:
        inode, position = self._positions.get(source.file, (0, 0))
        try:
            with open_file(source.file) as stream:
                status = os.fstat(stream.fileno())
                if status.st_ino != inode or status.st_size < position:
                    position = 0
                stream.seek(position)
                data = stream.read()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise RunError(f"cannot read {source.file}: {error.strerror}") from error
        whole = data if last else data[: data.rfind(b"\n") + 1]
        self._positions[source.file] = (status.st_ino, position + len(whole))
        if whole and len(self.sources) > 1 and self._shown is not source:
            heading = f"==> {single_line(source.label)} <==\n"
            self.out.write(f"{'' if self._shown is None else chr(10)}{heading}".encode())
        if whole:
            self._shown = source
            self.out.write(_shown(whole))
            self.out.flush()
        return bool(whole)


def _shown(data: bytes) -> bytes:
    """Return the text of a log. A progress bar that overwrites itself becomes one line for each state."""
    text = data.decode("utf-8", "backslashreplace").replace("\r\n", "\n").replace("\r", "\n")
    return visible(text).encode()


def sources(submission: Submission, rank: int | None = None) -> list[LogSource]:
    """Return the files to show of a submission: its jobs' output or, with `rank`, that rank's log.

    RunError: several runs have this rank.
    """
    if rank is None:
        return [LogSource(part.name, part.log) for part in submission.parts]
    trained = [part for part in submission.parts if part.role != JUDGE]
    if len(trained) > 1:
        cells = ", ".join(part.run.path.name for part in trained)
        raise RunError(f"--rank {rank} of which run? say --cell NAME: {cells}")
    return [LogSource(part.name, part.run.rank_log(rank)) for part in trained]


def show(submission: Submission, shown: Sequence[LogSource], out: BinaryIO) -> None:
    """Write the current contents. Raises RunError, with the state of the jobs, when no file exists."""
    if any(source.file.exists() for source in shown):
        Tails(shown, out)(last=True)
        return
    overview = states.overview([submission])
    ranks = sorted({log.name for part in submission.parts for log in part.run.logs.glob("rank-*.log")})
    missing = f"{shown[0].file} is not there" if len(shown) == 1 else f"no log of {submission.name} is there"
    lines = [
        f"{missing} yet; -f waits for it",
        *(["logs of ranks that are there: " + ", ".join(ranks)] if ranks else []),
        *(
            f"{s.part.id}: {s.text}" + (f": {s.note}" if s.note else "")
            for submission in overview.states
            for s in submission
        ),
        *([overview.unavailable] if overview.unavailable else []),
    ]
    raise RunError("\n".join(lines))


def follow(
    submission: Submission,
    sources: Sequence[LogSource],
    out: BinaryIO,
    report: Callable[[str], None],
    reader_gone: Callable[[], bool],
) -> list[JobState] | None:
    """Write the files as they grow until the jobs have ended; returns the last states. Raises RunError like `wait`.

    reader_gone: whether nobody reads `out` any more; then it ends at once and returns None.
    """
    watch, tails = SubmissionWatch([submission], report), Tails(sources, out)
    while not watch():
        tails()
        if reader_gone():
            return None
        time.sleep(LOOK)
    tails(last=True)
    return watch.states[0]
