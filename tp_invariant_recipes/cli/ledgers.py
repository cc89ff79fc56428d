# SPDX-License-Identifier: Apache-2.0
"""What reads ledgers: `tpi compare`, `tpi certify`, `tpi report` and `tpi bisect`."""

from pathlib import Path
from typing import Annotated

import typer

from tp_invariant_recipes.cli.arguments import Json, TrustRecipe, Verbose, argument, directory_option, flag, option
from tp_invariant_recipes.cli.output import finish
from tp_invariant_recipes.errors import LedgerError, RunError
from tp_invariant_recipes.machine import progress, terminal
from tp_invariant_recipes.text import single_line, visible


def compare(
    runs: Annotated[
        list[Path],
        argument("RUN_A RUN_B [RUN_C ...]", "Run directories, ledger files or certificates."),
    ],
    every: Annotated[bool, flag("Print every parameter that differs, not only the first 12.", "--all")] = False,
    as_json: Annotated[bool, flag("Print everything as one JSON object.", "--json")] = False,
) -> None:
    """Compare runs with the first one, bit for bit.

    Runs with the same model, data set and seed are comparable, whatever their layout. tpi compares everything that both
    ledgers hold of every common step: loss, gradient norm, learning rate, digests of gradients, master weights and
    optimizer moments, traces. It names the first difference in the order of execution. Exit status: 0 identical,
    1 different, 2 not comparable or unreadable.

    \b
    tpi compare runs/a runs/b
    tpi compare runs/a other-cluster.tpicert --json
    """
    from tp_invariant_recipes.api import commands
    from tp_invariant_recipes.comparison.compare import UNREADABLE
    from tp_invariant_recipes.comparison.result import error_report

    try:
        result = commands.compared(runs, every=every)
    except LedgerError as error:
        if as_json:
            terminal.print_json(error_report(error), indent=2)
        else:
            terminal.print_line(terminal.console(stderr=True), f"not comparable: {error}")
        raise typer.Exit(UNREADABLE) from None
    finish(result, as_json=as_json)


def certify(
    run: Annotated[Path | None, argument("RUN", "The run directory to pack.")] = None,
    out: Annotated[
        Path | None,
        option("FILE", "Where to write; default NAME.tpicert in the current directory, after the run directory NAME."),
    ] = None,
    check: Annotated[Path | None, option("FILE", "Check this certificate instead of making one.")] = None,
    expected: Annotated[
        str | None, option("HASH", "With --check: the hash that you received from its author.", "--hash")
    ] = None,
    as_json: Json = False,
) -> None:
    """Pack a run into a small file, or check one.

    The file holds the run's ledger, configuration and versions. The printed hash covers the whole file; send the hash
    through a separate channel. tpi compare and tpi verify --against accept the file like a run. Exit status: 0 the file
    was made or is intact, 2 otherwise.

    \b
    tpi certify runs/qwen3_8b-tp4-…
    tpi certify --check qwen3_8b-tp4-….tpicert --hash 5a3f…
    """
    from tp_invariant_recipes.api import commands

    finish(commands.certify(run, out=out, check=check, expected=expected), as_json=as_json)


def report(
    runs: Annotated[list[Path], argument("RUN", "Run directories, ledger files or certificates.")],
    out: Annotated[Path, option("FILE.html", "Name of the page.")] = Path("report.html"),
    force: Annotated[bool, flag("Overwrite an existing page.", "--force")] = False,
) -> None:
    """Write a page that compares runs with the first.

    The HTML page is a single file that loads nothing else. It shows verdicts, headers side by side, plots, distances in
    ULP, the parameters that differ, times and memory. Runs may be unfinished. Exit status: 0 written,
    whatever the verdict; 2 tpi cannot read a run or write the page.

    \b
    tpi report RUN
    tpi report RUN_A RUN_B --out differences.html
    """
    from tp_invariant_recipes.report import page
    from tp_invariant_recipes.report.runs import gather

    if out.exists() and not force:
        raise RunError(f"{out} exists already: give another file by --out, or overwrite it by --force")
    with progress.Counter(terminal.console(stderr=True)) as slow:
        gathered = gather(runs, reading=slow.reading, comparing=slow.counting("comparing: step"))
        drawn = page.page(gathered, page.sections(gathered))
        page.write(out, visible(drawn).encode())
    for line in page.verdicts(gathered):
        terminal.print_text(single_line(line))
    terminal.print_text(f"wrote {out}")


def bisect(
    run_a: Annotated[Path, argument("RUN_A", "A run directory.")],
    run_b: Annotated[Path, argument("RUN_B", "Another run directory, which differs.")],
    directory: Annotated[Path | None, directory_option("bisect-DATE-TIME")] = None,
    referee: Annotated[bool, flag("Arbitrate which run is right.", "--referee")] = False,
    _verbose: Verbose = False,
    _trusted: TrustRecipe = False,
    as_json: Json = False,
) -> None:
    """Find the operation at which two runs first differ.

    tpi trains both runs again, from their last checkpoint before the first step that differs, and traces every module
    at that step. Then it trains them once more to write the tensors there to files and to measure their distance. The
    original runs stay unchanged. Exit status: 1 they differ, 0 they do not, 2 tpi cannot compare them or train them
    again.

    With --referee tpi also arbitrates which run is right: the one that repeats its bits here, or whose operation a CPU
    confirms by its definition (numerics=portable).

    \b
    tpi bisect runs/qwen3_8b-tp2-… runs/qwen3_8b-tp4-…
    tpi bisect runs/monday runs/tuesday --referee
    """
    from tp_invariant_recipes.api import commands

    finish(commands.bisect(run_a, run_b, directory=directory, referee=referee), as_json=as_json)
