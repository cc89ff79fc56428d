# SPDX-License-Identifier: Apache-2.0
"""The files of a directory of `tpi verify`: the configurations, a run directory for each, and the result."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from tp_invariant_recipes.errors import RunError, reason
from tp_invariant_recipes.ledger.run_files import LARGEST
from tp_invariant_recipes.reading import Bounds, Count, Hash, Layout, Listed, Record, checked, parse_json, read_limited
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
class State(Record):
    """A state of a rank. text: what a verdict shows of its value; empty: nothing."""

    digest: str
    text: str


@dataclass(frozen=True)
class RankRecord(Record):
    """What a rank records for an audit of a resume.

    state: KIND/NAME → state before the first judged step.
    steps: step → what it reads and routes → digest.
    """

    state: dict[str, State]
    steps: dict[str, dict[str, str]]


@dataclass(frozen=True)
class AuditedRun(RunDir):
    """One training of an audit: a run directory with dumps (ledger/dumps.py), and one for each dithered repetition."""

    task = File("audit/task.json")  # what its ranks do beside training

    def state(self, rank: int) -> Path:
        """Return the file of what a rank records for an audit of a resume."""
        return self.path / "audit" / f"rank-{rank}.json"

    def dithered(self, number: int) -> Self:
        """Return the directory of a dithered repetition, counted from 1."""
        return type(self)(self.path / f"dithered-{number}")

    def read_states(self, ranks: int) -> list[RankRecord]:
        """Return what each rank has recorded for an audit of a resume. Raises RunError."""
        return [self._read(self.state(rank), parse_json, RankRecord) for rank in range(ranks)]

    def read_task(self) -> AuditTask:
        """Return the task. Raises RunError when this is no training of an audit."""
        return self._read(self.task, parse_json, AuditTask)


@dataclass(frozen=True)
class AuditDir(RunDir):
    """A directory with one run directory for each training of an audit."""

    result = File("audit.json")  # what the audit found
    card = File("card.yaml")  # of an audit of a resume: fields of a verification card

    def training(self, name: str) -> AuditedRun:
        """Return the run directory of a training."""
        return AuditedRun(self.path / name)


@dataclass(frozen=True)
class CampaignDir(RunDir):
    """A directory of `tpi audit --all`."""

    result = File("audits.json")  # every audit, and the faults that they found
    texts = File("texts")  # data whose masks lie unevenly

    def trial(self, number: int) -> Path:
        """Return the directory of an audit, counted from 1."""
        return self.path / "trials" / str(number)

    def read_result(self) -> dict[str, Any]:
        """Return what `audits.json` holds. Raises RunError when this is no directory of a campaign."""
        return self._read(self.result, parse_json, dict[str, Any])


SCHEMA = 1

Name = Annotated[str, Bounds(pattern=r"^[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,254}$")]  # of a directory beside matrix.json
Positive = Annotated[int, Bounds(ge=1, lt=2**31)]


@dataclass(frozen=True)
class SweepResult(Record):
    """`verify.json`, as far as another command reads it."""

    verdict: str
    exit_status: Literal[0, 1, 2]
    text: str


@dataclass(frozen=True)
class Axis(Record):
    """A key with several values, each as text that Hydra reads again."""

    key: str
    values: Listed[str]

    def __str__(self) -> str:
        return f"{self.key}={', '.join(self.values)}"


@dataclass(frozen=True)
class Configuration(Record):
    """A run of the sweep as it was planned; what its ledger must be, whoever ran it."""

    name: Name
    label: str
    overrides: Listed[str]
    ranks: Positive
    steps: Positive
    identity_hash: Hash
    layout: Layout
    numerics: dict[str, Any]


@dataclass(frozen=True)
class Omission(Record):
    """A combination of values that no run can have, and why."""

    label: str
    why: str

    def __str__(self) -> str:
        return f"{self.label}: {self.why}"


@dataclass(frozen=True)
class Sweep(Record):
    """Runs to compare with the first of them or, where `against` is a path, with the ledger there.

    overrides: as typed. omitted: combinations of the axes that are no configurations.
    seal:      shows who wrote it (launch/trust.py); empty: it shows nothing.
    """

    schema: int = field(default=SCHEMA, kw_only=True)
    model: str
    overrides: Listed[str]
    axes: Listed[Axis]
    cells: Annotated[tuple[Configuration, ...], Bounds(min_length=1, max_length=10_000, strict=False)]
    against: str | None
    omitted: Listed[Omission] = ()
    seal: str = ""

    def described(self) -> dict[str, Any]:
        """Return what results say of it, as JSON."""
        return {
            "model": self.model,
            "overrides": list(self.overrides),
            "axes": [{"key": axis.key, "values": list(axis.values)} for axis in self.axes],
            "left_out": [cell.as_json() for cell in self.omitted],
        }

    def __str__(self) -> str:
        without = f" (without {'; '.join(cell.label for cell in self.omitted)})" if self.omitted else ""
        return (" × ".join(map(str, self.axes)) or self.cells[0].label) + without


@dataclass(frozen=True)
class SweepDir(RunDir):
    """A directory with one run directory for each configuration."""

    matrix = File("matrix.json")  # the configurations, written before anything starts
    result = File("verify.json")  # what the comparison found

    def cell(self, name: str) -> RunDir:
        """Return the run directory of a configuration."""
        return RunDir(self.path / name)

    def write_matrix(self, matrix: Sweep) -> None:
        """Write the sweep. Raises RunError."""
        self.write(self.matrix, matrix.as_json())

    def read_matrix(self) -> Sweep:
        """Return the sweep. Raises RunError when this is not a directory of `tpi verify`, or two configurations are
        one run."""
        try:
            raw = parse_json(read_limited(self.matrix, LARGEST))
            if isinstance(raw, dict) and raw.get("schema") != SCHEMA:
                raise ValueError(f"this version reads schema {SCHEMA}")
            matrix = checked(Sweep, raw)
            self._distinct(matrix.cells)
        except (OSError, ValueError) as error:
            raise RunError(
                f"{self.path} is not a directory of tpi verify: {self.matrix.name}: {reason(error)}"
            ) from error
        return matrix

    def read_result(self) -> SweepResult:
        """Return the verdict. Raises RunError when there is none."""
        try:
            return checked(SweepResult, parse_json(read_limited(self.result, LARGEST)))
        except (OSError, ValueError) as error:
            raise RunError(f"{self.result}: {error}") from error

    def _distinct(self, cells: Sequence[Configuration]) -> None:
        """ValueError: two configurations are one run, which would be compared with itself."""
        for what, values in (
            ("name", [cell.name for cell in cells]),
            ("label", [cell.label for cell in cells]),
            ("set of overrides", [cell.overrides for cell in cells]),
            ("run directory", [str(self.cell(cell.name).path.resolve()) for cell in cells]),
        ):
            first: dict[Any, int] = {}
            for number, value in enumerate(values):
                if (before := first.setdefault(value, number)) != number:
                    raise ValueError(f"cells.{before} and cells.{number} have one {what}, so that they prove nothing")


def latest(folder: Path) -> Path:
    """Return the newest directory of `tpi verify` in a folder. Raises RunError when there is none."""
    folders = [(file.stat().st_mtime, file.parent) for file in folder.glob("*/matrix.json") if file.is_file()]
    if not folders:
        raise RunError(f"there is no directory of tpi verify in {folder}; name one: --dir DIR")
    return max(folders)[1]
