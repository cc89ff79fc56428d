"""`tpi train`."""

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from tp_invariant_recipes.cli.arguments import (
    ClusterFile,
    Json,
    Overrides,
    Verbose,
    flag,
    option,
    optional_model,
    with_cluster_file,
    with_model,
    with_option,
)
from tp_invariant_recipes.errors import ConfigError, RunError
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.plural import counted
from tp_invariant_recipes.start import needed

LAST = Path("last")  # of --resume

if TYPE_CHECKING:
    from rich.console import Console

    from tp_invariant_recipes.config.compose import Composed
    from tp_invariant_recipes.config.overrides import Override
    from tp_invariant_recipes.launch.plan import Plan
    from tp_invariant_recipes.launch.request import RunRequest


def train(
    model: Annotated[str | None, optional_model("needed with --resume")] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        option(
            "RUN", "Continue this run from its newest finished checkpoint; last: the latest below runs that can go on."
        ),
    ] = None,
    trace: Annotated[
        str | None,
        option(
            "FIRST:LAST",
            "Record digests of every module's inputs and outputs at these steps. The same as ledger.trace=…",
        ),
    ] = None,
    go_on: Annotated[bool, flag("Continue the run in run.dir; start it if there is none.", "--continue")] = False,
    launcher: Annotated[
        str | None,
        option("KIND", "local, or slurm: use srun on every node of the current allocation. The same as launcher=…"),
    ] = None,
    cluster_file: ClusterFile = None,
    dry_run: Annotated[
        bool, flag("Check everything, print the plan and its memory, and write nothing.", "--dry-run")
    ] = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Train a model and record the exact bits of every step.

    The run directory (runs/MODEL-…, or run.dir=PATH) receives the configuration, the command, the environment, one log
    per rank, checkpoints and the ledger. SIGTERM or Ctrl-C saves a checkpoint and stops; --resume continues the run.
    Exit status: 0 completed, or stopped by SIGTERM; 130 stopped by Ctrl-C; 2 a mistake or a failure.

    \b
    tpi train qwen3_8b tp=4
    tpi train qwen3_toy tp=2 iters=50 data=text data.path=~/books
    tpi train qwen3_toy save=10 run.dir=runs/a ; tpi train --resume runs/a
    tpi train --resume last
    tpi train qwen3_8b tp=4 model.attention_backend=unfused
    tpi train qwen3_8b tp=4 --trace 1:2
    tpi train weights=~/models/mine tp=4
    tpi train qwen3_8b tp=4 numerics=stock
    tpi train qwen3_8b tp=4 seq=8192 --dry-run
    tpi train qwen3_8b tp=8 dp=2 gbs=2 cluster=h100 launcher=slurm

    Every tensor-parallel degree computes the same bits, unless you ask for numerics=stock. The last command is for use
    inside an allocation (salloc); tpi submit makes a job of its own.
    """
    from tp_invariant_recipes.config.overrides import parse_all
    from tp_invariant_recipes.launch.request import RunRequest

    arguments = list(overrides or [])
    if resume is not None and model is not None and "=" in model:  # typer gives the first word to MODEL
        arguments.insert(0, model)
        model = None
    needed.check("tpi train", needed.TRAINING)
    model, arguments = with_model(model, arguments)
    arguments = with_option(arguments, "--trace", "ledger.trace", trace)
    arguments = with_option(arguments, "--launcher", "launcher", launcher)
    arguments = with_cluster_file(arguments, cluster_file)
    if resume is not None and go_on:
        raise ConfigError("--resume RUN continues a run wherever it is, --continue with the one in run.dir: give one")
    console = terminal.console_of_its_own()
    requested = tuple(parse_all(arguments))
    if resume == LAST:
        resume = _latest(requested, console)
    request = RunRequest(model, requested, resume, go_on)
    if dry_run or request.launcher != "slurm":  # in a job, another node may have begun there
        request.check_new_dir()
    if dry_run:
        _dry_run(request, console, as_json=as_json)
        return
    if request.launcher == "slurm" and as_json:
        raise ConfigError("--json is for runs of this process; with launcher=slurm, run.dir/run.json says how it ended")
    if request.launcher == "slurm":
        _train_on_nodes(request, console, verbose=verbose)
        return
    summary, interrupted = _train_here(request, console, verbose=verbose)
    if as_json:
        terminal.print_json(summary)
    else:
        terminal.print_line(console, _end_text(summary))
    if interrupted:
        raise typer.Exit(130)


def _latest(requested: "tuple[Override, ...]", console: "Console") -> Path:
    """Return the run of `--resume last`, which is printed. Raises ConfigError, RunError."""
    from tp_invariant_recipes.config.overrides import given
    from tp_invariant_recipes.runs import overview

    if LAST.exists():
        raise ConfigError(
            f"--resume {LAST}: there is such a directory here, too; for that one: --resume {LAST.absolute()}"
        )
    iters = given(requested, "train.train_iters")
    latest = overview.latest_to_resume(Path("runs"), int(iters.value) if iters and iters.value.isdigit() else None)
    terminal.print_line(console, f"--resume last: {latest.run}, {latest.state} at step {latest.step}")
    return latest.run


def _dry_run(request: "RunRequest", console: "Console", *, as_json: bool) -> None:
    """Plan and check a run, write nothing, and print what would start."""
    from tp_invariant_recipes.features.train import workflow as launch

    composed = request.composed()
    try:
        planned = _planned(request, composed, console, dry=True)
    except ConfigError:  # this machine lacks something: a login node has no GPUs
        if not as_json:
            terminal.print_text("\n".join(_memory_lines(composed)))
        raise
    _validate(planned, console)
    if as_json:
        terminal.print_json(launch.as_json(planned))
    else:
        terminal.console(soft_wrap=True).print(_plan_text(planned))


def _train_here(request: "RunRequest", console: "Console", *, verbose: bool) -> tuple[dict[str, Any], bool]:
    """Train on this machine. Returns the summary, and whether Ctrl-C stopped the run."""
    from tp_invariant_recipes.features.train import workflow as launch
    from tp_invariant_recipes.launch import progress, ranks

    composed = request.composed()
    with launch.locked_run(request, composed) as lock:
        if lock and lock.remark:
            terminal.print_line(console, lock.remark)
        planned = _planned(request, composed, console)
        _validate(planned, console)
        console.print(_start_text(planned), soft_wrap=True)
        if planned.completed:
            return launch.summary(planned, ranks.Outcome.COMPLETED), False
        with ranks.stopping() as stop, progress.watcher(planned, console, verbose=verbose) as watch:
            outcome = launch.execute(planned, watch, stop)
        return launch.summary(planned, outcome), stop.interrupted


def _planned(request: "RunRequest", composed: "Composed", console: "Console", *, dry: bool = False) -> "Plan":
    """Plan a run. Raises ConfigError: this machine lacks something."""
    from tp_invariant_recipes.launch import progress

    with progress.preparing(console, dry=dry) as how:
        return request.plan(composed, how)


def _validate(planned: "Plan", console: "Console") -> None:
    """Let Megatron-Bridge validate a run that is not completed. Raises ConfigError."""
    from tp_invariant_recipes.features.train import workflow as launch
    from tp_invariant_recipes.launch import progress
    from tp_invariant_recipes.sizing import room

    if planned.completed:
        return
    if tight := room.warning(planned.config, here=planned.here):
        terminal.print_line(console, f"warning: {tight}", "yellow")
    with progress.busy(console, "importing Megatron-Bridge and checking the configuration"):
        launch.check(planned)


def _train_on_nodes(request: "RunRequest", console: "Console", *, verbose: bool) -> None:
    """Run this node's part of the run. Outside of a step, replace this process by srun, which starts all nodes."""
    from tp_invariant_recipes.launch import progress, ranks
    from tp_invariant_recipes.multinode import agent, allocation_run, rendezvous
    from tp_invariant_recipes.runs import places

    place = rendezvous.node_info(os.environ)
    if place is None:
        allocation_run.exec_srun(request)

    @contextmanager
    def watch(planned: "Plan") -> Iterator[Callable[[], None]]:
        console.print(_start_text(planned), soft_wrap=True)
        with progress.watcher(planned, console, verbose=verbose) as tick:
            yield tick

    def remark(line: str) -> None:
        terminal.print_line(console, line)

    with ranks.stopping() as stop:  # from here on: SLURM may ask to stop while Bridge is imported
        task = allocation_run.node_task(request, place.count, watch, remark)
        result = agent.run(place, task, stop)
    if result.outcome is None and place.first:
        raise RunError(result.why or "the run failed")
    if result.outcome is None:
        raise typer.Exit(2)  # the first node prints the reason
    if place.first:
        console.print(result.word)
        for line in [] if result.requeued else places.lines(places.as_json(task.run_dir)):
            remark(line)
    if stop.interrupted:
        raise typer.Exit(130)


def _start_text(planned: "Plan") -> str:
    from tp_invariant_recipes.launch import resume
    from tp_invariant_recipes.patches import faults
    from tp_invariant_recipes.settings import low_precision

    if planned.completed:
        return escape(resume.completed_text(planned))
    ranks = counted(planned.layout.world, f"{planned.device} rank")
    save = planned.config.section("checkpoint")["save_interval"]
    every = "step" if save == 1 else f"{save} steps"
    kept = f"every {every} and on SIGTERM" if save else "on SIGTERM only (save=N: every N steps)"
    resumed = f", from step {planned.start}" if planned.start else ""
    lines = planned.config.recipe.adjusted
    adjusted = f"adjusted, numerics.adjust=false refuses it:\n{'\n'.join(f'  {line}' for line in lines)}\n"
    known = "; ".join(str(fault) for fault in faults.known(planned.config))
    warned = f"[yellow]warning: known faults of Megatron: {escape(known)}[/]\n" if known else ""
    chosen = planned.composed.graphs if planned.device == "gpu" else None
    graphs = f"CUDA graphs {escape(chosen)} (cuda_graph=auto)\n" if chosen else ""
    other = low_precision.remark(planned.config)
    fp8 = f"{escape(other)}\n" if other else ""
    return (
        f"[bold]{planned.composed.model}[/] on {ranks}, "
        f"{counted(planned.steps, 'step')}{resumed}, numerics={planned.config.numerics.mode}\n"
        f"{graphs}{fp8}{warned}{escape(adjusted) if lines else ''}"
        f"run directory {escape(str(planned.run_dir.path))}; checkpoints {kept}"
        + (f"\n{escape(planned.remark)}" if planned.remark else "")
    )


def _memory_lines(composed: "Composed") -> list[str]:
    from tp_invariant_recipes.sizing import memory
    from tp_invariant_recipes.sizing.room import table

    lines = table(memory.estimate(composed.config))
    return ["memory of the fullest rank, about:", *(f"  {line}" for line in lines)]


def _plan_text(planned: "Plan") -> str:
    if planned.completed:
        return _start_text(planned)
    prepared = ["its text would be prepared first"] if planned.data_missing else []
    return "\n".join(
        [
            _start_text(planned),
            *prepared,
            *_memory_lines(planned.composed),
            "every check passed, those of Megatron-Bridge as well; nothing is written",
        ]
    )


def _end_text(summary: dict) -> str:
    from tp_invariant_recipes.runs import places

    figures = (
        "" if summary["loss"] is None else f": loss {summary['loss']:.4f}, gradient norm {summary['grad_norm']:.4f}"
    )
    lines = [f"{summary['outcome']} at step {summary['steps']} of {summary['of']}{figures}"]
    if summary["diverged"] is not None:
        ledger = Path(summary["run"]) / "ledger.jsonl"
        lines.append(
            f"warning: replicas of a tensor disagree at step {summary['diverged']}, or weights are not their master "
            "weights rounded: ranks have diverged; "
            f'which tensors and ranks, {ledger} says there under "diverged"'
        )
    if summary["outcome"] == "stopped":
        lines.append(f"continue with: {shlex.join(['tpi', 'train', '--resume', summary['run']])}")
    return "\n".join([*lines, *places.lines(summary)])
