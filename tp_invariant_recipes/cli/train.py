# SPDX-License-Identifier: Apache-2.0
"""`tpi train`, and `tpi data`, which makes the datasets that `tpi train data=text` reads."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tp_invariant_recipes.cli.arguments import (
    Json,
    Overrides,
    TrustRecipe,
    Verbose,
    flag,
    help_text,
    option,
    optional_model,
    resumed_words,
    with_model,
)
from tp_invariant_recipes.cli.output import finish
from tp_invariant_recipes.errors import ConfigError, RunError
from tp_invariant_recipes.machine import progress, terminal
from tp_invariant_recipes.start import needed
from tp_invariant_recipes.text import plural

if TYPE_CHECKING:
    from rich.console import Console

    from tp_invariant_recipes.launch.plan import Plan
    from tp_invariant_recipes.launch.record import RunRequest

data_app = typer.Typer(help="Turn text into the indexed datasets that Megatron trains on.", no_args_is_help=True)


@data_app.callback()
def data() -> None:
    """Turn text into the indexed datasets that Megatron trains on."""  # keeps `prepare` a command of its own


def prepare(
    source: Annotated[
        Path,
        typer.Argument(help="A file or a folder: text (one document a file) or JSONL (one document a line), also .gz."),
    ],
    output: Annotated[
        Path | None, option("PREFIX", "Write PREFIX.bin and .idx; default data/ and the name of SOURCE.")
    ] = None,
    tokenizer: Annotated[
        str, option(None, "'byte' (ids are UTF-8 bytes, eod is 256), or a local folder with a Hugging Face tokenizer.")
    ] = "byte",
    json_key: Annotated[str, option(None, "The key of the text in a JSONL line.")] = "text",
    as_json: Json = False,
) -> None:
    """Turn SOURCE into an indexed dataset of Megatron.

    If a folder has JSONL files, the command reads only these, and lists the files that it leaves out. It writes the
    whole dataset or nothing. For more than 10 GB use Megatron's preprocess_data, whose datasets tpi accepts.

    \b
    tpi data prepare ~/books
    tpi data prepare pages.jsonl.gz --output data/pages --json-key body
    """
    from tp_invariant_recipes.data import text  # numpy

    corpus = text.select(source)
    console = terminal.console(stderr=True)
    terminal.print_line(console, f"reading {corpus}")
    with progress.Counter(console) as slow:
        prefix = output or Path("data", text.plain_name(source))
        made = text.prepare(source, prefix, tokenizer, json_key, slow.reading(source))
    if as_json:
        left_out = {"left_out": [*corpus.left]}
        terminal.print_json({"prefix": str(prefix), "tokenizer": tokenizer} | made.as_json() | left_out)
        return
    terminal.print_text(f"{prefix}: {plural(made.documents, 'document')}, {plural(made.tokens, 'token')}")
    terminal.print_text(f"digest {made.digest}")
    named = "" if tokenizer == "byte" else f" data.tokenizer={tokenizer}"
    terminal.print_text(f"train on it: tpi train MODEL data=text data.path={prefix}{named}")


data_app.command("prepare", help=help_text(prepare))(prepare)


def train(
    model: Annotated[str | None, optional_model("needed with --resume")] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        option("RUN", "Continue this run from its newest finished checkpoint."),
    ] = None,
    go_on: Annotated[bool, flag("Continue the run in run.dir; start it if there is none.", "--continue")] = False,
    dry_run: Annotated[
        bool, flag("Check everything, print the plan and its memory, and write nothing.", "--dry-run")
    ] = False,
    _verbose: Verbose = False,
    _trusted: TrustRecipe = False,
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
    tpi train qwen3_8b tp=4 model.attention_backend=unfused
    tpi train qwen3_8b tp=4 ledger.trace=1:2
    tpi train weights=~/models/mine tp=4
    tpi train qwen3_8b tp=4 numerics=stock
    tpi train qwen3_8b tp=4 seq=8192 --dry-run
    tpi train qwen3_8b tp=8 dp=2 gbs=2 cluster=h100 launcher=slurm

    Every tensor-parallel degree that divides numerics.virtual_shards (8 by default) computes the same bits, unless you
    ask for Megatron's own numerics. Use the last command inside an allocation (salloc); tpi submit makes a job of its
    own.
    """
    from tp_invariant_recipes.api import commands
    from tp_invariant_recipes.config.overrides import parse_all
    from tp_invariant_recipes.launch.record import RunRequest

    arguments = list(overrides or [])
    if resume is not None:
        model, arguments = resumed_words(model, arguments)
    needed.check("tpi train", needed.TRAINING)
    model, arguments = with_model(model, arguments)
    console = terminal.console_of_its_own()
    request = RunRequest(model, tuple(parse_all(arguments)), resume, go_on)
    if dry_run or request.launcher != "slurm":  # in a job, another node may have begun there
        request.check_new_dir()
    if dry_run:
        _dry_run(request, console, as_json=as_json)
    if request.launcher == "slurm" and as_json:
        raise ConfigError(
            "--json is for runs of this process; with launcher=slurm, run.dir/run.json records its outcome"
        )
    if request.launcher == "slurm":
        _train_on_nodes(request, console)
        return
    result = commands.train_here(request, console)
    if not as_json:  # beside the progress: standard output stays empty
        terminal.print_all(console, result.lines())
        raise typer.Exit(result.exit_status)
    finish(result, as_json=True)


def _dry_run(request: "RunRequest", console: "Console", *, as_json: bool) -> NoReturn:
    """Plan and check a run, write nothing, and print what would start."""
    from tp_invariant_recipes.api import commands
    from tp_invariant_recipes.features.train.result import PlanResult, memory_lines
    from tp_invariant_recipes.launch import progress

    composed = request.composed()
    try:
        with progress.preparing(console, dry=True) as how:
            planned = request.plan(composed, how)
    except ConfigError:  # this machine lacks something: a login node has no GPUs
        if not as_json:
            terminal.print_all(terminal.console(), memory_lines(composed))
        raise
    commands.validate(planned, console)
    finish(PlanResult(planned), as_json=as_json)


def _train_on_nodes(request: "RunRequest", console: "Console") -> None:
    """Run this node's part of the run. Outside of a step, replace this process by srun, which starts all nodes."""
    from tp_invariant_recipes.features.train.result import start_lines
    from tp_invariant_recipes.launch import progress, ranks
    from tp_invariant_recipes.multinode import agent, rendezvous, srun
    from tp_invariant_recipes.runs import overview

    place = rendezvous.node_info(os.environ)
    if place is None:
        srun.exec_srun(request)

    @contextmanager
    def watch(planned: "Plan") -> Iterator[Callable[[], None]]:
        terminal.print_all(console, start_lines(planned))
        with progress.watcher(planned, console) as tick:
            yield tick

    def remark(line: str) -> None:
        terminal.print_line(console, line)

    with ranks.stopping() as stop:  # from here on: SLURM may ask to stop while Bridge is imported
        task = agent.NodeTask.of(request, watch, remark)
        result = agent.run(place, task, stop)
    if result.outcome is None and place.first:
        raise RunError(result.why or "the run failed")
    if result.outcome is None:
        raise typer.Exit(2)  # the first node prints the reason
    if place.first:
        console.print(result.word)
        for line in [] if result.requeued else overview.place_lines(task.run_dir):
            remark(line)
    if stop.interrupted:
        raise typer.Exit(130)
