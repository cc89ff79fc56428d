"""`tpi bench`."""

from pathlib import Path
from typing import Annotated

from rich.text import Text

from tp_invariant_recipes.cli.arguments import Json, Model, Overrides, Verbose, directory_option, option
from tp_invariant_recipes.cli.output.verdict import finish
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.start import needed


def bench(
    model: Model,
    overrides: Overrides = None,
    modes: Annotated[
        str,
        option(None, "Modes, each also with +digests, +guard; tpi compares the others with the first."),
    ] = "stock,tree",
    rounds: Annotated[int, option(None, "Rounds; every mode has one turn per round.", min=1, max=100)] = 2,
    warmup: Annotated[int, option(None, "Untimed warm-up steps per turn.", min=0)] = 5,
    steps: Annotated[int, option(None, "Timed steps per turn.", min=1)] = 15,
    directory: Annotated[Path | None, directory_option("bench-MODEL-tpN-DATE-TIME")] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Measure step time, memory and tokens/s of numerics modes.

    The modes train in turn. The table shows medians over the timed steps. Ratios are taken within a round and shown as
    their median, smallest and largest.

    \b
    tpi bench qwen3_8b tp=4
    tpi bench qwen3_8b tp=4 --modes tree,tree+digests,tree+guard
    tpi bench qwen3_toy tp=2 seq=64 --rounds 3
    """
    from tp_invariant_recipes.features import bench as workflow
    from tp_invariant_recipes.features.train.workflow import check
    from tp_invariant_recipes.launch import progress
    from tp_invariant_recipes.machine.progress import busy

    needed.check("tpi bench", needed.TRAINING)
    console = terminal.console_of_its_own()
    named = [mode.strip() for mode in modes.split(",") if mode.strip()]
    with progress.preparing(console) as how:
        planned = workflow.new(
            model, overrides or [], named, rounds=rounds, warmup=warmup, steps=steps, directory=directory, how=how
        )
    with busy(console, "importing Megatron-Bridge and checking the configurations"):
        for plan in planned.plans.values():
            check(plan)
    terminal.print_line(console, f"benchmark directory {planned.directory.path}")
    watch = progress.headed(console, lambda turn, _: Text(turn), verbose=verbose)
    finish(workflow.execute(planned, watch), as_json=as_json)
