"""The output of `tpi verify` and `tpi sweep` while they train the runs of a matrix."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich import box
from rich.table import Column, Table
from rich.text import Text

from tp_invariant_recipes.foreign_text import single_line
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.plural import counted

if TYPE_CHECKING:
    from tp_invariant_recipes.features.verify.sweep import Swept
    from tp_invariant_recipes.features.verify.verdict import CellResult, MatrixVerdict
    from tp_invariant_recipes.features.verify.workflow import Verification
    from tp_invariant_recipes.launch.local import Watch
    from tp_invariant_recipes.launch.plan import Plan


def table(first: str, *figures: str, last: str) -> Table:
    """Return an empty table of runs, for rows that begin with `cells`.

    figures: titles of columns after the last loss.
    """
    numbers = [Column(title, justify="right", no_wrap=True) for title in ("ranks", "steps", "last loss", *figures)]
    ends = (Column(title, overflow="fold") for title in (first, last))
    return Table(next(ends), *numbers, next(ends), box=box.SIMPLE_HEAD, collapse_padding=True)


def cells(row: "CellResult", style: str = "") -> list[Text]:
    """Return the first cells of a run.

    They are Text, because a name may contain characters that rich reads as markup.
    """
    steps = str(row.steps) if row.steps == row.planned else f"{row.steps} of {row.planned}"
    return [Text(single_line(row.label), style=style), Text(str(row.ranks)), Text(steps), Text(row.last_loss)]


def train_matrix[T: "MatrixVerdict | Swept"](
    plan: "Callable[..., Verification | T]", execute: "Callable[[Verification, Watch], T]", *, verbose: bool
) -> T:
    """Plan and check the runs, name those left out, and return what `execute` does. Raises a TpiError.

    plan: takes `how`. It returns the verdict instead where all runs of an earlier verify have passed.
    """
    from tp_invariant_recipes.features.verify import workflow as verify
    from tp_invariant_recipes.launch import progress
    from tp_invariant_recipes.sizing import room

    console = terminal.console_of_its_own()
    with progress.preparing(console) as how:
        planned = plan(how=how)
    if not isinstance(planned, verify.Verification):
        terminal.print_line(console, f"every run in {planned.directory} has passed; nothing is trained again")
        return planned
    with progress.busy(console, "importing Megatron-Bridge and checking the configurations"):
        verify.check(planned)
    for combination in planned.matrix.omitted:
        terminal.print_line(console, f"left out: {combination.label}: {combination.why}")
    for cell in planned.cells:
        if tight := room.warning(planned.plans[cell.name].config, here=True):
            terminal.print_line(console, f"warning: {cell.label}: {tight}", "yellow")
    runs = len(planned.plans)
    terminal.print_line(console, f"{counted(runs, 'run')} in {planned.directory.path}")
    labels = [cell.label for cell in planned.cells]

    def heading(label: str, run: "Plan") -> Text:
        ranks = counted(run.layout.world, f"{run.device} rank")
        number = f"{labels.index(label) + 1} of {len(labels)}"
        return Text(f"{number}: {label}", style="bold") + Text(f" on {ranks}, {counted(run.steps, 'step')}")

    return execute(planned, progress.headed(console, heading, verbose=verbose))
