"""`tpi sweep`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from tp_invariant_recipes.cli.arguments import (
    Json,
    Overrides,
    Verbose,
    directory_option,
    option,
    optional_model,
    with_model,
)
from tp_invariant_recipes.cli.output import matrix, verdict
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.foreign_text import single_line
from tp_invariant_recipes.machine import terminal

if TYPE_CHECKING:
    from tp_invariant_recipes.features.verify.sweep import Swept


def sweep(
    model: Annotated[str | None, optional_model("needed with --results")] = None,
    overrides: Overrides = None,
    directory: Annotated[Path | None, directory_option("sweep-MODEL-DATE-TIME")] = None,
    results: Annotated[
        Path | None, option("DIR", "Train nothing; list the runs in this directory of an earlier sweep.")
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Train a model with several learning rates, seeds or sizes.

    A key may have several values. tpi trains one run for every combination, one after the other, and lists how each
    ended; report.html shows their curves side by side. Bits are not compared, because the runs may be different
    experiments: tpi verify does that for layouts. tpi submit --sweep makes an array of jobs. Exit status: 0 all runs
    reached their last step, 2 otherwise.

    \b
    tpi sweep qwen3_toy lr=1e-3,3e-4 seed=1,2,3
    tpi sweep qwen3_8b tp=4 gbs=4,8 iters=200 --dir runs/batch
    tpi sweep --results runs/batch
    """
    if results is not None:
        if model is not None or overrides or directory is not None:
            raise ConfigError("--results DIR takes its runs from the directory: leave MODEL, overrides and --dir out")
        from tp_invariant_recipes.features.verify.sweep import results as results_of

        swept = results_of(results.expanduser())
    elif model is None:
        raise ConfigError("name a model to train (tpi models lists them), or a sweep to list: --results DIR")
    else:
        from tp_invariant_recipes.features.verify import sweep as launch

        named, arguments = with_model(model, list(overrides or []))
        plan = partial(launch.new, named, arguments, directory=directory)
        swept = matrix.train_matrix(plan, launch.execute, verbose=verbose)
    verdict.end(swept.as_dict(), swept.exit_status, lambda: _print(swept), as_json=as_json)


def _print(swept: "Swept") -> None:
    from tp_invariant_recipes.features.verify.sweep import COMPLETED, value

    console = terminal.console()
    table = matrix.table("run", "gradient norm", last="ended")
    for row in swept.rows:
        norm = value(row.ledger.steps[-1].grad_norm) if row.ledger and row.steps else None
        table.add_row(
            *matrix.cells(row, "bold" if row is swept.lowest else ""),
            Text("" if norm is None else f"{norm:.6g}"),
            Text(single_line(row.words), style="" if row.state == COMPLETED else "yellow"),
        )
    console.print(table)
    terminal.print_line(console, single_line(swept.line))
    for sentence in swept.remarks:
        terminal.print_line(console, single_line(sentence), "dim")
    terminal.print_line(console, f"runs in {swept.directory}" + (f"; curves in {swept.page}" if swept.page else ""))
