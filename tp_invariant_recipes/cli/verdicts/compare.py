"""`tpi compare`: did these runs compute the same bits?"""

from pathlib import Path
from typing import Annotated

import typer

from tp_invariant_recipes.cli.arguments import argument, flag
from tp_invariant_recipes.cli.output.verdict import finish
from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.machine import progress, terminal


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
    from tp_invariant_recipes.compare.compare import UNREADABLE, compare_all
    from tp_invariant_recipes.compare.result import CompareResult, error_report
    from tp_invariant_recipes.ledger.open import streamed

    try:
        if len(runs) < 2:
            raise LedgerError("a comparison needs two runs: tpi compare RUN_A RUN_B")
        with progress.Counter(terminal.console(stderr=True)) as slow:
            first, *others = [streamed(run, progress=slow.reading(run)) for run in runs]
            comparisons = compare_all(first, others, progress=slow.counting("comparing: step"))
    except LedgerError as error:
        if as_json:
            terminal.print_json(error_report(error), indent=2)
        else:
            terminal.print_line(terminal.console(stderr=True), f"not comparable: {error}")
        raise typer.Exit(UNREADABLE) from None
    finish(CompareResult(comparisons, every), as_json=as_json, indent=2)
