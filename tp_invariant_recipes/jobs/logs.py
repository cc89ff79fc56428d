"""What jobs print, as it is and as it grows. Stopping or killing this changes no job."""

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
        if whole:  # a progress bar that overwrites itself becomes one line for each state
            self._shown = source
            text = whole.decode("utf-8", "backslashreplace").replace("\r\n", "\n").replace("\r", "\n")
            self.out.write(visible(text).encode())
            self.out.flush()
        return bool(whole)


def sources(submission: Submission, rank: int | None = None) -> list[LogSource]:
    """Return the files to show of a submission: its jobs' output or, with `rank`, that rank's log.

    RunError: several runs have this rank.
    """
    if rank is None:
        return [LogSource(part.name, part.log) for part in submission.parts]
    trained = [part for part in submission.parts if part.role != JUDGE]
    if len(trained) > 1:
        cells = ", ".join(f"{part.id} ({part.run.path.name})" for part in trained)
        raise RunError(f"--rank {rank} of which run? name its job: {cells}")
    return [LogSource(part.name, part.run.rank_log(rank)) for part in trained]


def show(submission: Submission, shown: Sequence[LogSource], out: BinaryIO) -> None:
    """Write the current contents. Raises RunError, with the state of the jobs, when no file exists."""
    if any(source.file.exists() for source in shown):
        Tails(shown, out)(last=True)
        return
    known, unavailable = states.overview([submission])
    ranks = sorted({log.name for part in submission.parts for log in part.run.logs.glob("rank-*.log")})
    missing = f"{shown[0].file} is not there" if len(shown) == 1 else f"no log of {submission.directory.name} is there"
    lines = [f"{missing} yet; -f waits for it"]
    lines += ["logs of ranks that are there: " + ", ".join(ranks)] if ranks else []
    lines += [f"{s.part.id}: {s.text}" + (f": {s.note}" if s.note else "") for s in known]
    raise RunError("\n".join([*lines, *([unavailable] if unavailable else [])]))


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
    watch, tails = states.Watch([submission], report), Tails(sources, out)
    while not watch():
        tails()
        if reader_gone():
            return None
        time.sleep(states.LOOK)
    tails(last=True)
    return watch.states[0]
