"""The files of a directory of `tpi verify`: the cells of its matrix, a run directory for each, and the verdict."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tp_invariant_recipes import renamed
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.runs.run_dir import RunDir

SCHEMA = 1


@dataclass(frozen=True)
class Axis:
    """A key with several values, each as text that Hydra reads again."""

    key: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.key}={', '.join(self.values)}"


@dataclass(frozen=True)
class Cell:
    """A run of the matrix as it was planned; what its ledger must be, whoever ran it."""

    name: str
    label: str
    overrides: tuple[str, ...]
    ranks: int
    steps: int
    identity_hash: str
    layout: dict[str, Any]
    numerics: dict[str, Any]


@dataclass(frozen=True)
class Matrix:
    """Runs to compare with the first of them or, where `against` is a path, with the ledger there."""

    model: str
    overrides: tuple[str, ...]  # as typed
    axes: tuple[Axis, ...]
    cells: tuple[Cell, ...]
    against: str | None

    def __str__(self) -> str:
        return " × ".join(map(str, self.axes)) or self.cells[0].label


@dataclass(frozen=True)
class MatrixDir(RunDir):
    """A directory with one run directory for each cell."""

    @property
    def matrix(self) -> Path:
        """The cells, written before anything starts."""
        return self.path / "matrix.json"

    @property
    def result(self) -> Path:
        """What the comparison found."""
        return self.path / "verify.json"

    def cell(self, name: str) -> RunDir:
        """The run directory of a cell."""
        return RunDir(self.path / name)

    def write_matrix(self, matrix: Matrix) -> None:
        """Write the matrix. Raises RunError."""
        self.write(self.matrix, {"schema": SCHEMA} | asdict(matrix))

    def read_matrix(self) -> Matrix:
        """The matrix. Raises RunError when this is not a directory of `tpi verify`."""
        try:
            raw = json.loads(self.matrix.read_text(encoding="utf-8"))
            if raw.pop("schema") != SCHEMA:
                raise ValueError(f"this version reads schema {SCHEMA}")
            axes = tuple(Axis(axis["key"], tuple(axis["values"])) for axis in raw.pop("axes"))
            cells = tuple(_cell(cell) for cell in raw.pop("cells"))
            return Matrix(**raw | {"overrides": _overrides(raw)}, axes=axes, cells=cells)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunError(f"{self.path} is not a directory of tpi verify: {self.matrix.name}: {error}") from error


def _cell(raw: dict[str, Any]) -> Cell:
    return Cell(**raw | {"overrides": _overrides(raw), "numerics": renamed.section("numerics", raw["numerics"])})


def _overrides(raw: dict[str, Any]) -> tuple[str, ...]:
    return tuple(renamed.override(text) for text in raw["overrides"])
