"""The files of an audit's directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

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


@dataclass(frozen=True)
class CampaignDir(RunDir):
    """A directory of `tpi audit --all`."""

    result = File("audits.json")  # every audit, and the faults that they found
    page = File("audits.html")  # the same to look at
    texts = File("texts")  # data whose masks lie unevenly

    def trial(self, number: int) -> Path:
        """Return the directory of an audit, counted from 1."""
        return self.path / "trials" / str(number)

    def read_result(self) -> dict[str, Any]:
        """Return what `audits.json` holds. Raises RunError when this is no directory of a campaign."""
        return self._read(self.result, parse_json, dict[str, Any])
