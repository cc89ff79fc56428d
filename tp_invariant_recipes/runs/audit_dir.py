"""The files of an audit's directory."""

from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.compare.norm_ratios import Norms
from tp_invariant_recipes.reading import Count, Record, parse_json
from tp_invariant_recipes.runs.run_dir import File, RunDir


@dataclass(frozen=True)
class AuditTask(Record):
    """What the ranks of a training do. rounded_from: the step from which they round the weights; None: never."""

    rounded_from: Count | None


@dataclass(frozen=True)
class AuditedRun(RunDir):
    """One training of an audit: a run directory with the gradient norms of every step."""

    task = File("audit/task.json")  # what its ranks do beside training
    norms = File("audit/norms.jsonl")  # gradient norms, one line a step

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

    result = File("audit.json")  # what the audit found

    def training(self, name: str) -> AuditedRun:
        """The run directory of a training."""
        return AuditedRun(self.path / name)
