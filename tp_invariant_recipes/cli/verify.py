"""Trainings in turn: `tpi verify` and `tpi bench`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.start import needed
from tp_invariant_recipes.text import counted

if TYPE_CHECKING:
    from tp_invariant_recipes.features.verify.verdict import MatrixVerdict
    from tp_invariant_recipes.features.verify.workflow import Verification
    from tp_invariant_recipes.launch.plan import Plan


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
    verbose: Verbose = False,
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
    if last_failed:
        if model is not None or overrides or recheck is not None:
            raise ConfigError(
                "--last-failed takes its runs from a directory of tpi verify: leave MODEL, overrides and --recheck out"
            )
        needed.check("tpi verify --last-failed", needed.TRAINING)
        from tp_invariant_recipes.features.verify import workflow as launch
        from tp_invariant_recipes.runs.matrix_dir import latest

        where = latest(Path("runs")) if directory is None else directory.expanduser()
        rerun = partial(launch.plan_rerun, where, against=against)
        judged = _train(rerun, exitfirst=exitfirst, verbose=verbose)
    elif recheck is not None:
        if model is not None or overrides or directory is not None or exitfirst:
            raise ConfigError(
                "--recheck DIR takes its runs from the directory: leave MODEL, overrides, --dir and --exitfirst out"
            )
        from tp_invariant_recipes.features.verify.verdict import judge as judge_directory

        judged = judge_directory(recheck.expanduser(), against)
    elif model is None:
        raise ConfigError(
            "name a model to verify (tpi models lists them), or a directory to compare again: --recheck DIR"
        )
    else:
        needed.check("tpi verify", needed.TRAINING)
        from tp_invariant_recipes.features.verify import workflow as launch

        named, arguments = with_model(model, list(overrides or []))
        plan = partial(launch.new, named, arguments, against=against, directory=directory)
        judged = _train(plan, exitfirst=exitfirst, verbose=verbose)
    finish(judged, as_json=as_json)


def _train(plan: "Callable[..., Verification | MatrixVerdict]", *, exitfirst: bool, verbose: bool) -> "MatrixVerdict":
    """Plan and check the runs, name those left out, train and judge them. Raises a TpiError.

    plan: takes `how`. It returns the verdict instead where all runs of an earlier verify have passed.
    """
    from tp_invariant_recipes.features.verify import workflow
    from tp_invariant_recipes.launch import progress
    from tp_invariant_recipes.machine.progress import busy
    from tp_invariant_recipes.sizing import room

    console = terminal.console_of_its_own()
    with progress.preparing(console) as how:
        planned = plan(how=how)
    if not isinstance(planned, workflow.Verification):
        terminal.print_line(console, f"every run in {planned.directory} has passed; nothing is trained again")
        return planned
    with busy(console, "importing Megatron-Bridge and checking the configurations"):
        workflow.check(planned)
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

    return workflow.execute(planned, progress.headed(console, heading, verbose=verbose), exitfirst=exitfirst)


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
    verbose: Verbose = False,
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
