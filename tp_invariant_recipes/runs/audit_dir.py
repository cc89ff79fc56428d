"""The files of an audit's directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_invariant_recipes.compare.norm_ratios import Norms
from tp_invariant_recipes.reading import Count, Record, parse_json
from tp_invariant_recipes.runs.run_dir import RunDir


@dataclass(frozen=True)
class AuditTask(Record):
    """What the ranks of a training do. rounded_from: the step from which they round the weights; None: never."""

    rounded_from: Count | None


@dataclass(frozen=True)
class AuditedRun(RunDir):
    """One training of an audit: a run directory with the gradient norms of every step."""

    @property
    def task(self) -> Path:
        """What its ranks do beside training."""
        return self.path / "audit" / "task.json"

    @property
    def norms(self) -> Path:
        """Gradient norms, one line a step."""
        return self.path / "audit" / "norms.jsonl"

    def write_task(self, task: AuditTask) -> None:
        """Write the task. Raises RunError."""
        self.write(self.task, task.as_json())

    def read_task(self) -> AuditTask:
        """The task. Raises RunError when this is no training of an audit."""
        return self._read(self.task, parse_json, AuditTask)

    def read_norms(self) -> list[Norms]:
        """What the training found. Raises RunError."""
        return self._read(self.norms, _lines, list[Norms], limit=1 << 30)


def _lines(data: bytes) -> list[Any]:
    return [parse_json(line, constants=True) for line in data.splitlines()]


@dataclass(frozen=True)
class AuditDir(RunDir):
    """A directory with one run directory for each training of an audit."""

    @property
    def result(self) -> Path:
        """What the audit found."""
        return self.path / "audit.json"

    def training(self, name: str) -> AuditedRun:
        """The run directory of a training."""
        return AuditedRun(self.path / name)
