# SPDX-License-Identifier: Apache-2.0
"""The verdict on the finished runs of a sweep. It needs only their directories: no Bridge, no GPU."""

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, override

from rich import box
from rich.table import Column, Table
from rich.text import Text

from tp_invariant_recipes.comparison import compare
from tp_invariant_recipes.comparison.compare import Comparison, Verdict
from tp_invariant_recipes.comparison.explanation import run_name
from tp_invariant_recipes.comparison.result import comparison_json
from tp_invariant_recipes.comparison.text import compared_values, machine_remark, remarks, stock_remark, verdict_line
from tp_invariant_recipes.errors import LedgerError, RunError
from tp_invariant_recipes.ledger.bits import described, readable
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.run_files import RunFile, ranks
from tp_invariant_recipes.ledger.schema import canonical
from tp_invariant_recipes.result import Result
from tp_invariant_recipes.runs import restarts
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.runs.sweep_dir import Configuration, Sweep, SweepDir
from tp_invariant_recipes.text import plural, single_line

SCHEMA = 1

# The states of a configuration besides the verdicts of a comparison.
REFERENCE = "reference"  # the others are compared with it
FAILED = "failed"  # it did not run to its end, or its ledger is not the planned run's
STOPPED = "stopped"
NOT_RUN = "not run"

PASSED = (REFERENCE, Verdict.IDENTICAL.value)
INCOMPLETE = "incomplete"  # the whole sweep: a configuration failed, was stopped or did not run
_COLOURS = {Verdict.IDENTICAL.value: "green", Verdict.DIFFERENT.value: "red", REFERENCE: "dim"}
EXIT_STATUS = {verdict.value: status for verdict, status in compare.EXIT_STATUS.items()} | {INCOMPLETE: 2}


@dataclass(frozen=True)
class ConfigurationResult:
    """One configuration, or in the first row the ledger that all configurations are compared with.

    state:      one of the words above, or a comparison's verdict.
    why:        the reason of a failure or stop; None otherwise.
    ledger:     None: there is no readable ledger.
    comparison: with the reference; None: this is the reference, or there is nothing to compare.
    """

    label: str
    run: Path
    ranks: int
    planned: int
    state: str
    why: str | None
    ledger: Ledger | None
    comparison: Comparison | None

    @property
    def steps(self) -> int:
        """The number of whole steps in its ledger."""
        return len(self.ledger.steps) if self.ledger else 0

    @property
    def loss(self) -> str | None:
        """The bits of its last step's loss."""
        return self.ledger.steps[-1].loss if self.ledger and self.ledger.steps else None

    def as_json(self) -> dict[str, Any]:
        """Return a row of `verify.json`."""
        return {
            "label": self.label,
            "run": str(self.run),
            "ranks": self.ranks,
            "steps": self.steps,
            "of": self.planned,
            "loss": described(self.loss),
            "state": self.state,
            "why": self.why,
            "text": self.words,
            "comparison": None if self.comparison is None else comparison_json(self.comparison),
        }

    @property
    def words(self) -> str:
        """Its state in one line."""
        if self.why is not None:
            return f"{self.state}: {self.why.splitlines()[0]}"
        comparison = self.comparison
        if comparison is None:
            return self.state
        if comparison.first is not None:
            first = comparison.first
            where = f" at step {first.step}: {first.name}" if first.step else f": {first.explanation}"
            return f"{self.state}{where}"
        if comparison.verdict is Verdict.IDENTICAL and comparison.tally.compared < comparison.steps_total:
            return f"{self.state}, {comparison.tally.compared} of {comparison.steps_total} steps"
        return self.state


@dataclass(frozen=True)
class SweepVerdict(Result):
    """The verdict on a sweep.

    verdict: "identical", "different", "not comparable" or "incomplete".
    line:    the whole verdict in one line. remarks: facts that a reader needs to judge it, one sentence each.
    advice:  the next command; None: there is none.
    interrupted: whether Ctrl-C ended the trainings.
    """

    directory: Path
    matrix: Sweep
    rows: tuple[ConfigurationResult, ...]
    verdict: str
    line: str
    remarks: tuple[str, ...]
    advice: str | None
    interrupted: bool = False

    @property
    def cells(self) -> tuple[ConfigurationResult, ...]:
        """The rows of the runs, without that of another ledger that they are compared with."""
        return self.rows[1 if self.matrix.against else 0 :]

    @property
    @override
    def exit_status(self) -> int:
        """0 identical, 1 different, 2 otherwise; after Ctrl-C 130, whatever the verdict on what was done."""
        return 130 if self.interrupted else EXIT_STATUS[self.verdict]

    @override
    def as_json(self) -> dict[str, Any]:
        """Everything as JSON; documented in docs/verify.md."""
        return {
            "schema": SCHEMA,
            "exit_status": self.exit_status,
            "verdict": self.verdict,
            "text": self.line,
            "remarks": list(self.remarks),
            "next": self.advice,
            "directory": str(self.directory),
            **self.matrix.described(),
            "against": self.matrix.against,
            "rows": [row.as_json() for row in self.rows],
        }

    @override
    def lines(self) -> Iterator[Text | Table | str]:
        numbers = [Column(title, justify="right", no_wrap=True) for title in ("ranks", "steps", "last loss")]
        first, last = (Column(title, overflow="fold") for title in ("configuration", "verdict"))
        table = Table(first, *numbers, last, box=box.SIMPLE_HEAD, collapse_padding=True)
        for row in self.rows:
            steps = str(row.steps) if row.steps == row.planned else f"{row.steps} of {row.planned}"
            loss = "" if row.loss is None else str(readable(row.loss))
            table.add_row(  # Text, because a name may contain characters that rich reads as markup
                *map(Text, (single_line(row.label), str(row.ranks), steps, loss)),
                Text(single_line(row.words), style=_COLOURS.get(row.state, "yellow")),
            )
        yield table
        line = Text(single_line(self.line))
        line.stylize(f"bold {_COLOURS.get(self.verdict, 'yellow')}", 0, len(self.verdict))
        yield line
        yield from (Text(sentence, style="dim") for sentence in self.remarks)
        if self.advice:
            yield f"continue with: {self.advice}"


def judge(directory: Path, against: Path | str | None = None, *, exitfirst: bool = False) -> SweepVerdict:
    """Compare the configurations in a directory of `tpi verify` with the first complete one, or with the ledger of
    --against.

    It writes `verify.json`. against: another path to that ledger, which may have moved. exitfirst: whether
    configurations were left out after the first that differs. Raises RunError when `directory` is not of `tpi verify`,
    LedgerError when the ledger to compare with cannot be read.
    """
    verdict = verdict_on(directory, against, exitfirst=exitfirst)
    SweepDir(directory).write(SweepDir(directory).result, verdict.as_json())
    return verdict


def verdict_on(directory: Path, against: Path | str | None = None, *, exitfirst: bool = False) -> SweepVerdict:
    """Compare the configurations as above, and write nothing."""
    where = SweepDir(directory)
    matrix = where.read_matrix()
    if against is not None:
        matrix = replace(matrix, against=str(against))
    cells = [examine(where, cell) for cell in matrix.cells]
    if matrix.against is not None:
        reference = _reference(Path(matrix.against))
        rows = [reference, *(_compared(row, reference) for row in cells)]
    else:
        reference = next((row for row in cells if row.why is None), cells[0])
        rows = [_compared(row, reference) for row in cells]
    return _judged(directory, matrix, tuple(rows), exitfirst)


def examine(where: SweepDir, cell: Configuration) -> ConfigurationResult:
    """Return the state of a configuration before it is compared: complete, or the reason why it does not count."""
    run = where.cell(cell.name)
    ledger, state, why = None, REFERENCE, None
    if run.ledger.exists():
        try:
            ledger = read(run.path)
        except LedgerError as error:
            state, why = FAILED, str(error)
    if why is None:
        state, why = _ended(where, cell, ledger)
    if ledger is not None and why is None and (wrong := _another_run(cell, ledger) or _other_overrides(run, cell)):
        state, why = FAILED, wrong
    return ConfigurationResult(cell.label, run.path, cell.ranks, cell.steps, state, why, ledger, None)


def _ended(where: SweepDir, cell: Configuration, ledger: Ledger | None) -> tuple[str, str | None]:
    run = where.cell(cell.name)
    at = f"at step {len(ledger.steps) if ledger else 0} of {cell.steps}"
    so_far = restarts.read_restarts(run)
    if so_far and so_far[-1].outcome == STOPPED:
        return STOPPED, at
    if so_far and so_far[-1].outcome == FAILED:
        why = so_far[-1].why or ""
        return FAILED, why if "\n" in why else f"{why} ({at})"
    if ledger is None:
        return NOT_RUN, "its run directory has no ledger"
    if len(ledger.steps) < cell.steps:
        return FAILED, f"its ledger ends {at}" + ("; the last line is torn" if ledger.torn else "")
    return REFERENCE, None


def _another_run(cell: Configuration, ledger: Ledger) -> str | None:
    """Why a complete ledger is not the configuration's own: a copy of another configuration's ledger would prove
    nothing."""
    header = ledger.header
    planned = {"identity": cell.identity_hash, "layout": cell.layout, "numerics": cell.numerics}
    recorded = {"identity": header.identity_hash, "layout": header.layout, "numerics": header.numerics}
    wrong = [name for name in planned if canonical(recorded[name]) != canonical(planned[name])]  # True is not 1
    if wrong:
        return f"its ledger is of another run than planned: {', '.join(wrong)}"
    for resumed in header.notes.get("resumed", ()):
        changed = [key for key in resumed["changed"] if key.startswith(("layout.", "numerics."))]
        if changed:
            return f"after step {resumed['after_step']} it continued with another {', '.join(changed)}"
    return None


# First words of keys that say where a run is and what it keeps; a resume adds the numerics, which `_another_run` reads.
_OF_A_PLACE = ("run", "launcher", "slurm", "cluster", "checkpoint", "save", "ledger", "logging", "logger", "numerics")


def _other_overrides(run: RunDir, cell: Configuration) -> str | None:
    """Why a run is not the configuration's own, though its identity, layout and numerics are: overrides choose
    kernels, too."""
    try:
        trained = run.read_run(RunFile).overrides
    except RunError as error:
        return str(error)
    own, wanted = (
        {key: value for key, _, value in (text.partition("=") for text in texts)} for texts in (trained, cell.overrides)
    )
    other = [key for key in sorted(own | wanted) if own.get(key) != wanted.get(key)]
    named = ", ".join(key for key in other if key.lstrip("+~").partition(".")[0] not in _OF_A_PLACE)
    return f"it was trained with other overrides than planned: {named}" if named else None


def _reference(path: Path) -> ConfigurationResult:
    against, here = Path(os.path.expanduser(path)), Path.cwd()  # Path.expanduser raises where a user is unknown
    if against.is_relative_to(here):
        against = against.relative_to(here)  # the path that people would type
    try:
        ledger = read(against)
    except LedgerError as error:
        raise LedgerError(f"{error}; name it again: --against FILE") from error
    run = against if against.is_dir() else ledger.path
    return ConfigurationResult(
        str(run_name(ledger)), run, ranks(ledger.header.layout), len(ledger.steps), REFERENCE, None, ledger, None
    )


def _compared(row: ConfigurationResult, reference: ConfigurationResult) -> ConfigurationResult:
    if row is reference or row.why is not None or row.ledger is None or reference.ledger is None:
        return row
    comparison = compare.compare(reference.ledger, row.ledger)
    return replace(row, state=comparison.verdict.value, comparison=comparison)


def _judged(directory: Path, matrix: Sweep, rows: tuple[ConfigurationResult, ...], exitfirst: bool) -> SweepVerdict:
    compared = [row for row in rows if row.comparison is not None]
    firsts = {n: row.comparison.first.step for n, row in enumerate(compared) if row.comparison and row.comparison.first}
    different = compared[min(firsts, key=firsts.__getitem__)] if firsts else None
    not_run = [row for row in rows if row.state == NOT_RUN and exitfirst and different]
    faulty = [row for row in rows if row.why is not None and row not in not_run]
    reference = next((row for row in rows if row.state == REFERENCE), rows[0])
    verdict, line = _verdict(matrix, compared, faulty, different, reference)
    retry = shlex.join(["tpi", "verify", "--last-failed", "--dir", os.fspath(directory)])
    advice = _next_command(reference, different) if different else retry if faulty else None
    facts = (*map("Left out: {}.".format, matrix.omitted), *_remarks(rows, compared))
    if not_run:
        labels = ", ".join(row.label for row in not_run)
        facts = (*facts, f"--exitfirst: {labels} did not run; {retry} trains the rest.")
    return SweepVerdict(directory, matrix, rows, verdict, line, facts, advice)


def _verdict(
    matrix: Sweep,
    compared: list[ConfigurationResult],
    faulty: list[ConfigurationResult],
    different: ConfigurationResult | None,
    reference: ConfigurationResult,
) -> tuple[str, str]:
    if faulty or not compared:
        states = {state: [row.label for row in faulty if row.state == state] for state in (FAILED, STOPPED, NOT_RUN)}
        parts = [f"{', '.join(labels)} {_WAS[state]}" for state, labels in states.items() if labels]
        if different is not None:
            parts.append(_different(different, reference))
        elif any(row.state == Verdict.NOT_COMPARABLE.value for row in compared):
            parts.append(_not_comparable(compared, reference))
        elif compared:
            others = ", ".join(row.label for row in (reference, *compared))
            parts.append(f"{others} are bitwise identical over {_extent(compared)}")
        return INCOMPLETE, (f"{INCOMPLETE}: {'; '.join(parts)}")
    if any(row.state == Verdict.NOT_COMPARABLE.value for row in compared):
        return Verdict.NOT_COMPARABLE.value, _not_comparable(compared, reference)
    if different is not None:
        return Verdict.DIFFERENT.value, _different(different, reference)
    against = "" if matrix.against is None else f" to {reference.label}"
    are = "is" if against and len(compared) == 1 else "are"
    return Verdict.IDENTICAL.value, (f"identical: {matrix} {are} bitwise identical{against} over {_extent(compared)}")


def _extent(compared: list[ConfigurationResult]) -> str:
    """Describe the extent of the smallest of these comparisons, as "100 steps (loss, …)"."""
    comparisons = [row.comparison for row in compared if row.comparison is not None]
    shortest = min(comparisons, key=lambda comparison: comparison.tally.compared)
    least = min(
        comparisons,
        key=lambda comparison: (
            comparison.steps_digested,
            comparison.tally.coverage["moments"].both,
            comparison.tally.coverage["trace"].both,
        ),
    )
    steps, total = shortest.tally.compared, shortest.steps_total
    extent = plural(steps, "step") if steps == total else f"{steps} of {plural(total, 'step')}"
    limits = "" if least.steps_digested else "; gradients and weights themselves were not compared"
    skipped = f"; {shortest.tally.skipped} of them skipped" if shortest.tally.skipped else ""
    return f"{extent} ({compared_values(least)}{limits}){skipped}"


def _different(row: ConfigurationResult, reference: ConfigurationResult) -> str:
    assert row.comparison is not None  # chosen for its first difference
    where = verdict_line(row.comparison).removeprefix(Verdict.DIFFERENT.value)
    return f"different: {row.label} is not bitwise identical to {reference.label}{where}"


def _not_comparable(compared: list[ConfigurationResult], reference: ConfigurationResult) -> str:
    row = next(row for row in compared if row.state == Verdict.NOT_COMPARABLE.value)
    assert row.comparison is not None  # among those compared
    return f"{verdict_line(row.comparison)} ({reference.label} and {row.label})"


_WAS = {FAILED: "failed", STOPPED: "was stopped", NOT_RUN: "did not run"}


def _remarks(rows: tuple[ConfigurationResult, ...], compared: list[ConfigurationResult]) -> tuple[str, ...]:
    why = [f"{row.label} {_WAS[row.state]}: {row.why}" for row in rows if row.why and "\n" in row.why]
    stopped = [
        f"{row.label}: continue it (tpi train --resume {shlex.quote(os.fspath(row.run))}), then judge again "
        f"(tpi verify --recheck {shlex.quote(os.fspath(row.run.parent))})."
        for row in rows
        if row.state == STOPPED and row.ledger is not None
    ]
    comparisons = [row.comparison for row in compared if row.comparison]
    different = [comparison for comparison in comparisons if comparison.first]
    sentences = [sentence for comparison in comparisons if not comparison.first for sentence in remarks(comparison)]
    sentences = [*dict.fromkeys(sentences)]
    for remark in (machine_remark, stock_remark):
        sentences += dict.fromkeys(sentence for comparison in different for sentence in remark(comparison))
    if any(comparison.initial for comparison in different):
        sentences.append("numerics.initial_weights=invariant starts all of them from the same weights.")
    return (*why, *stopped, *sentences)


def _next_command(reference: ConfigurationResult, different: ConfigurationResult) -> str:
    """Get the next command for two runs that differ: bisect for run directories that differ at a step, else compare."""
    first = different.comparison.first if different.comparison else None
    can = first is not None and first.step > 0 and reference.run.is_dir() and different.run.is_dir()
    return shlex.join(["tpi", "bisect" if can else "compare", os.fspath(reference.run), os.fspath(different.run)])
