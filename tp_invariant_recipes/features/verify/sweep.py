"""`tpi sweep`: train every combination of values, which may make other experiments, and list how each run ended."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tp_invariant_recipes.config import reserved
from tp_invariant_recipes.config.overrides import Override, parse_all, texts
from tp_invariant_recipes.errors import TpiError, refuse
from tp_invariant_recipes.features.verify import matrix
from tp_invariant_recipes.features.verify.cells import cell_of, compose_cells, environments, plan_cells
from tp_invariant_recipes.features.verify.verdict import REFERENCE, CellResult, examine
from tp_invariant_recipes.features.verify.workflow import Verification, train_cells
from tp_invariant_recipes.foreign_text import visible
from tp_invariant_recipes.launch.local import Watch
from tp_invariant_recipes.launch.plan import TO_TRAIN, Planning
from tp_invariant_recipes.ledger.bits import described, readable
from tp_invariant_recipes.plural import counted
from tp_invariant_recipes.runs.lock import locked_empty
from tp_invariant_recipes.runs.matrix_dir import Matrix, MatrixDir
from tp_invariant_recipes.runs.run_dir import choose_for_several

SCHEMA = 1
COMPLETED, INCOMPLETE = "completed", "incomplete"
MOST_ON_PAGE = 26  # runs


@dataclass(frozen=True)
class Swept:
    """How the runs of a sweep ended.

    rows: a run each. page: the report that shows them side by side; None: no_page says why there is none.
    interrupted: whether Ctrl-C ended the trainings.
    """

    directory: Path
    matrix: Matrix
    rows: tuple[CellResult, ...]
    page: Path | None
    no_page: str | None
    interrupted: bool = False

    @property
    def completed(self) -> list[CellResult]:
        """The runs that reached their last step."""
        return [row for row in self.rows if row.state == COMPLETED]

    @property
    def exit_status(self) -> int:
        """0 all runs completed, 2 otherwise; after Ctrl-C 130."""
        return 130 if self.interrupted else 0 if len(self.completed) == len(self.rows) else 2

    @property
    def verdict(self) -> str:
        """ "completed" or "incomplete"."""
        return COMPLETED if len(self.completed) == len(self.rows) else INCOMPLETE

    @property
    def lowest(self) -> CellResult | None:
        """The completed run with the lowest loss at its last step; None: no loss is a number."""
        losses = [(value(row.loss), n) for n, row in enumerate(self.rows) if row in self.completed]
        numbers = [(loss, n) for loss, n in losses if loss is not None]
        return self.rows[min(numbers)[1]] if numbers else None

    @property
    def line(self) -> str:
        """All in one line."""
        lowest = self.lowest
        best = f"; lowest last loss: {lowest.label}, {lowest.last_loss}" if lowest and len(self.completed) > 1 else ""
        return (
            f"{self.verdict}: {len(self.completed)} of {counted(len(self.rows), 'run')} reached their last step{best}"
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """Facts beside the table, one sentence each."""
        omitted = map("Left out: {}.".format, self.matrix.omitted)
        return (*omitted, *([f"No page: {self.no_page}."] if self.no_page else []))

    def as_dict(self) -> dict[str, Any]:
        """Return the contents of `sweep.json`; documented in docs/sweep.md."""
        return {
            "schema": SCHEMA,
            "exit_status": 0 if self.verdict == COMPLETED else 2,
            "verdict": self.verdict,
            "text": self.line,
            "directory": str(self.directory),
            **self.matrix.described(),
            "page": None if self.page is None else str(self.page),
            "rows": [_row(row) for row in self.rows],
        }


def new(
    model: str, overrides: Sequence[str | Override], *, directory: Path | None, how: Planning = TO_TRAIN
) -> Verification:
    """Plan all runs, whatever the keys. It writes only the data cache. TpiError: lists the problems of all."""
    requested = parse_all(overrides)
    problems, sound = reserved.check("sweep", requested)
    axes, choices = matrix.spread(sound, problems)
    if not axes and not problems:
        problems.append(f"no key has several values: lr=1e-3,3e-4 gives two runs; one run is tpi train {model} …")
    composed, omitted = compose_cells(model, axes, choices, problems, how.here)
    choices = tuple(choice for choice in choices if choice.label in composed)
    where = MatrixDir(choose_for_several(directory, f"sweep-{model}"))
    plans = plan_cells(choices, list(composed.values()), where, how)
    refuse(environments(plans) if how.here else [])
    cells = tuple(cell_of(choice, plans[choice.name]) for choice in choices)
    return Verification(where, Matrix(model, texts(requested), axes, cells, None, omitted, "sweep"), plans)


def execute(planned: Verification, watch: Watch) -> Swept:
    """Write the directory, train the runs one after the other, and list them. Raises RunError.

    If a run fails, the others still run; SIGTERM or Ctrl-C ends all. watch: as for `verify.execute`.
    """
    with locked_empty(planned.directory):
        interrupted = train_cells(planned, watch)
        return replace(results(planned.directory.path), interrupted=interrupted)


def results(directory: Path) -> Swept:
    """How the runs in a directory of `tpi sweep` ended; writes `sweep.json` and the page. Raises RunError."""
    where = MatrixDir(directory)
    planned = where.read_matrix("sweep")
    rows = [examine(where, cell) for cell in planned.cells]
    rows = [replace(row, state=COMPLETED) if row.state == REFERENCE else row for row in rows]
    page, why = _page(where, rows)
    swept = Swept(directory, planned, tuple(rows), page, why)
    where.write(where.sweep, swept.as_dict())
    return swept


def value(bits: str | None) -> float | None:
    """Return the number of these bits; None: there are none, or it is no finite number."""
    number = None if bits is None else readable(bits)
    return number if isinstance(number, float) else None


def _page(where: MatrixDir, rows: Sequence[CellResult]) -> tuple[Path | None, str | None]:
    """Return the page of all runs that have a step; None, and why there is none."""
    from tp_invariant_recipes.report import files, page
    from tp_invariant_recipes.report.runs import gather

    paths = [row.run for row in rows if row.steps]
    if not paths:
        return None, "no run has a step"
    if len(paths) > MOST_ON_PAGE:
        return None, f"it holds {MOST_ON_PAGE} runs, and there are {len(paths)}; tpi report RUN… shows those you choose"
    try:
        gathered = gather(paths, compared=False)
        files.write(where.page, visible(page.page(gathered, page.sections(gathered))).encode())
    except TpiError as error:
        return None, str(error)
    return where.page, None


def _row(row: CellResult) -> dict[str, Any]:
    last = row.ledger.steps[-1] if row.steps and row.ledger else None
    return row.as_dict() | {"grad_norm": described(last.grad_norm) if last else None}
