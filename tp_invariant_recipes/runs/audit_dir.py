"""The files of an audit's directory."""

from dataclasses import dataclass
from typing import Self

from tp_invariant_recipes.reading import Count, Record, parse_json
from tp_invariant_recipes.runs.run_dir import File, RunDir


@dataclass(frozen=True)
class AuditTask(Record):
    """What the ranks of a training record.

    passes:      how often they train it; all but the first time with dithered outputs.
    first, last: steps that they record.
    follow:      the training whose choices of experts they take, relative to the run directory; None: their own.
    """

    passes: Count
    first: Count
    last: Count
    follow: str | None


@dataclass(frozen=True)
class AuditedRun(RunDir):
    """One training of an audit: a run directory with dumps (ledger/dumps.py), and one for each dithered repetition."""

    task = File("audit/task.json")  # what its ranks do beside training

    def dithered(self, number: int) -> Self:
        """Return the directory of a dithered repetition, counted from 1."""
        return type(self)(self.path / f"dithered-{number}")

    def read_task(self) -> AuditTask:
        """Return the task. Raises RunError when this is no training of an audit."""
        return self._read(self.task, parse_json, AuditTask)


@dataclass(frozen=True)
class AuditDir(RunDir):
    """A directory with one run directory for each training of an audit."""

    result = File("audit.json")  # what the audit found
    page = File("audit.html")  # the same to look at

    def training(self, name: str) -> AuditedRun:
        """Return the run directory of a training."""
        return AuditedRun(self.path / name)
