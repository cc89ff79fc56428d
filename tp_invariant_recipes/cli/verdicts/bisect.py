"""`tpi bisect`."""

from pathlib import Path
from typing import Annotated

from rich.text import Text

from tp_invariant_recipes.cli.arguments import Json, TrustRecipe, Verbose, argument, directory_option, flag
from tp_invariant_recipes.cli.output.verdict import finish
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.result import Result
from tp_invariant_recipes.start import needed


def bisect(
    run_a: Annotated[Path, argument("RUN_A", "A run directory.")],
    run_b: Annotated[Path, argument("RUN_B", "Another run directory, which differs.")],
    directory: Annotated[Path | None, directory_option("bisect-DATE-TIME")] = None,
    referee: Annotated[bool, flag("Also say which run is right.", "--referee")] = False,
    verbose: Verbose = False,
    _trusted: TrustRecipe = False,
    as_json: Json = False,
) -> None:
    """Find the operation at which two runs first differ.

    tpi trains both runs again, from their last checkpoint before the first step that differs, and traces every module
    at that step. Then it trains them once more to write the tensors there to files and to measure their distance. The
    original runs stay unchanged. Exit status: 1 they differ, 0 they do not, 2 tpi cannot compare them or train them
    again.

    With --referee tpi also says which run is right: the one that repeats its bits here, or whose operation a CPU
    confirms by its definition (numerics=portable).

    \b
    tpi bisect runs/qwen3_8b-tp2-… runs/qwen3_8b-tp4-…
    tpi bisect runs/monday runs/tuesday --referee
    """
    from tp_invariant_recipes.compare.text import verdict_line
    from tp_invariant_recipes.features.bisect import workflow
    from tp_invariant_recipes.launch import progress

    planned = workflow.new(run_a.expanduser(), run_b.expanduser(), directory, referee=referee)
    if isinstance(planned, Result):
        finish(planned, as_json=as_json)
    needed.check("tpi bisect", needed.TRAINING)
    console = terminal.console_of_its_own()
    terminal.print_line(console, f"recorded: {verdict_line(planned.first)}")
    terminal.print_line(console, f"training step {planned.step} again in {planned.directory.path}")
    watch = progress.headed(console, lambda label, _: Text(label, style="bold"), verbose=verbose)
    finish(workflow.execute(planned, watch), as_json=as_json)
