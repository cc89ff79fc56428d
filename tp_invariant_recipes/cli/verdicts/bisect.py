"""`tpi bisect`."""

import shlex
from pathlib import Path
from typing import Annotated, Any

from rich.text import Text

from tp_invariant_recipes.cli.arguments import Json, Verbose, argument, directory_option, flag
from tp_invariant_recipes.cli.output import verdict
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.start import needed


def bisect(
    run_a: Annotated[Path, argument("RUN_A", "A run directory.")],
    run_b: Annotated[Path, argument("RUN_B", "Another run directory, which differs.")],
    directory: Annotated[Path | None, directory_option("bisect-DATE-TIME")] = None,
    referee: Annotated[bool, flag("Also say which run is right.", "--referee")] = False,
    verbose: Verbose = False,
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
    from tp_invariant_recipes.compare.compare import Comparison
    from tp_invariant_recipes.compare.comparison_json import comparison_json
    from tp_invariant_recipes.compare.stock_help import weights_drawn
    from tp_invariant_recipes.compare.text import verdict_line
    from tp_invariant_recipes.features.bisect import workflow as launch
    from tp_invariant_recipes.launch import progress

    planned = launch.new(run_a.expanduser(), run_b.expanduser(), directory, referee=referee)
    if isinstance(planned, Comparison):
        text = f"{verdict_line(planned)}\n{weights_drawn(planned) or 'there is no step to train again'}"
        recorded = {"recorded": comparison_json(planned)}
        verdict.end(recorded, planned.exit_status, lambda: terminal.print_text(text), as_json=as_json)
    needed.check("tpi bisect", needed.TRAINING)
    console = terminal.console_of_its_own()
    terminal.print_line(console, f"recorded: {verdict_line(planned.first)}")
    terminal.print_line(console, f"training step {planned.step} again in {planned.directory.path}")
    watch = progress.headed(console, lambda label, _: Text(label, style="bold"), verbose=verbose)
    result = launch.execute(planned, watch)
    verdict.end(result, result["exit_status"], lambda: _print(result), as_json=as_json)


def _print(result: dict[str, Any]) -> None:
    console = terminal.console()
    lines = [result["text"]]
    if result["operation"]:
        lines.append(f"the operation: {result['operation']}")
    if result["magnitude"]:
        lines.append(f"{result['dumped'][0]}: {result['magnitude']}")
        equal = [name for name, distance in result["distances"].items() if distance.get("differing") == 0]
        if equal:
            lines.append(f"equal: {', '.join(equal)}")
        lines.append(f"values: {result['directory']}/dumped-a/dumps and dumped-b/dumps")
    if result.get("referee"):
        lines.insert(1, result["referee"]["text"])
    traced = shlex.join(result["traced"])
    lines += [*result["remarks"], f"to look further: tpi compare {traced} --all, tpi report {traced}"]
    terminal.print_line(console, lines[0], "bold")
    for line in lines[1:]:
        terminal.print_line(console, line)
