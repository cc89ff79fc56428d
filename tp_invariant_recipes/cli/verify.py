# SPDX-License-Identifier: Apache-2.0
"""Trainings in turn: `tpi verify` and `tpi bench`."""

from pathlib import Path
from typing import Annotated

from rich.text import Text

from tp_invariant_recipes.cli.arguments import (
    Json,
    Model,
    Overrides,
    TrustRecipe,
    Verbose,
    directory_option,
    flag,
    option,
    optional_model,
    with_model,
)
from tp_invariant_recipes.cli.output import finish
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.start import needed


def verify(
    model: Annotated[str | None, optional_model("needed with --recheck")] = None,
    overrides: Overrides = None,
    against: Annotated[
        Path | None,
        option("FILE", "Compare all runs with this certificate, run directory or ledger instead of the first run."),
    ] = None,
    directory: Annotated[Path | None, directory_option("verify-MODEL-DATE-TIME")] = None,
    exitfirst: Annotated[bool, flag("Stop at the first run that fails or differs.", "-x", "--exitfirst")] = False,
    last_failed: Annotated[
        bool,
        flag(
            "Train again only the runs of an earlier verify that failed, differed, were stopped or did not run: "
            "of --dir, or of the newest in runs.",
            "--lf",
            "--last-failed",
        ),
    ] = False,
    recheck: Annotated[
        Path | None, option("DIR", "Train nothing; compare the runs in this directory of an earlier verify.")
    ] = None,
    _verbose: Verbose = False,
    _trusted: TrustRecipe = False,
    as_json: Json = False,
) -> None:
    """Train a model in several layouts and compare their bits.

    A key may have several values: tp=1,2,4 sp=true,false "dp=range(1,3)". tpi trains one run for every combination and
    compares it with the first: losses, gradient norms, learning rates, and digests of gradients, master weights and
    optimizer moments. Exit status: 0 identical, 1 different, 2 some runs failed or are not comparable.

    \b
    tpi verify qwen3_8b tp=2,4 iters=100
    tpi verify qwen3_toy tp=1,2 sp=true,false seq=64 --dir runs/check
    tpi verify qwen3_8b tp=4 --against from-another-gpu.tpicert
    tpi verify qwen3_8b tp=2,4,8 --exitfirst ; tpi verify --last-failed
    """
    from tp_invariant_recipes.api import commands

    words = list(overrides or [])
    if not last_failed and recheck is None:
        model, words = with_model(model, words)
    result = commands.verify(
        model, *words, against=against, directory=directory, exitfirst=exitfirst, last_failed=last_failed,
        recheck=recheck,
    )  # fmt: skip
    finish(result, as_json=as_json)


def bench(
    model: Model,
    overrides: Overrides = None,
    modes: Annotated[
        str,
        option(None, "Modes, each also with +digests or +guard; tpi compares the others with the first."),
    ] = "stock,deterministic,tree",
    rounds: Annotated[int, option(None, "Rounds; every mode has one turn per round.", min=1, max=100)] = 2,
    warmup: Annotated[int, option(None, "Untimed warm-up steps per turn.", min=0)] = 5,
    steps: Annotated[int, option(None, "Timed steps per turn.", min=1)] = 15,
    directory: Annotated[Path | None, directory_option("bench-MODEL-tpN-DATE-TIME")] = None,
    _verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Measure step time, memory and tokens/s of numerics modes.

    The modes train in turn, each as its users run it: with CUDA graphs, fused kernels and overlaps where it has them.
    The table shows medians over the timed steps, and the median, smallest and largest ratio within a round; lines
    below it say what each mode had on. Keys that only Megatron's numerics have, such as comm_overlap.tp_comm_overlap,
    go to stock and deterministic alone.

    \b
    tpi bench qwen3_8b tp=4 comm_overlap.tp_comm_overlap=true
    tpi bench qwen3_8b tp=4 --modes tree,tree+digests,tree+guard
    tpi bench qwen3_toy tp=2 seq=64 --rounds 3
    """
    from tp_invariant_recipes.features import bench as workflow
    from tp_invariant_recipes.launch import progress
    from tp_invariant_recipes.launch.train import check
    from tp_invariant_recipes.machine.progress import busy

    needed.check("tpi bench", needed.TRAINING)
    console = terminal.console_of_its_own()
    named = [mode.strip() for mode in modes.split(",") if mode.strip()]
    with progress.preparing(console) as how:
        planned = workflow.new(
            model, overrides or [], named, rounds=rounds, warmup=warmup, steps=steps, directory=directory, how=how
        )
    with busy(console, "importing Megatron-Bridge and checking the configurations"):
        for plan in reversed(planned.plans.values()):
            check(plan)
    terminal.print_line(console, f"benchmark directory {planned.directory.path}")
    watch = progress.headed(console, lambda turn, _: Text(turn))
    finish(workflow.execute(planned, watch), as_json=as_json)
