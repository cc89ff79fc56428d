# SPDX-License-Identifier: Apache-2.0
"""`tpi audit`."""

import time
from pathlib import Path
from typing import Annotated, Any

from rich.text import Text

from tp_invariant_recipes.cli.arguments import Json, Overrides, directory_option, flag, option, optional_model
from tp_invariant_recipes.cli.output import finish
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.start import bridge, needed


def audit(
    model: Annotated[str | None, optional_model("with --recorded")] = None,
    overrides: Overrides = None,
    reference: Annotated[
        list[str] | None, option("KEY=VALUE", "Change the reference too, as by tp=2. May be repeated.")
    ] = None,
    against: Annotated[
        list[str] | None,
        option(
            "KEY=VALUE", "Audit the model with this override; the reference is the model as given. May be repeated."
        ),
    ] = None,
    recorded: Annotated[
        tuple[Path, Path] | None,
        option("RUN REFERENCE", "Compare two recordings of tp_invariant_recipes.recordings.record()."),
    ] = None,
    every: Annotated[
        bool,
        flag("Audit every layout and option of the model; the configurations cover each pair once.", "--all"),
    ] = False,
    resume: Annotated[Path | None, option("DIR", "Continue --all in its directory.")] = None,
    script: Annotated[
        bool, flag("With --all: write a torchrun script of the layer alone for each fault that has one.", "--script")
    ] = False,
    exitfirst: Annotated[bool, flag("With --all: stop at the first new fault.", "--exitfirst", "-x")] = False,
    resume_at: Annotated[
        int | None,
        option("K", "Audit a resume at step K: compare each state and step bit for bit.", "--resume-at"),
    ] = None,
    card: Annotated[
        bool, flag("With --resume-at: write checkpoint_resume of a Megatron-Bridge verification card.", "--card")
    ] = False,
    keep: Annotated[bool, flag("Keep the run directories even if nothing is wrong.", "--keep")] = False,
    directory: Annotated[Path | None, directory_option("audit-MODEL-tpN-DATE-TIME")] = None,
    as_json: Json = False,
) -> None:
    """Find out whether a layout is wrong, or only rounds differently.

    tpi trains a step of the configuration and of a reference: the same model, weights and data on one rank, without
    graphs, overlap and fusions, one sequence at a time. It repeats the reference with a random 1-ULP perturbation of
    every module's output, and compares the differences of outputs, gradients, the norm and updates with those that the
    perturbation causes. It names the first module outside rounding-error tolerance. numerics=stock is the default here.
    Exit status: 0 within rounding, 1 beyond rounding, 2 not decided.

    With --resume-at tpi names the first state that a resume does not restore, and what it changes. The default is
    numerics=deterministic. Exit status: 0 whole, 1 differs, 2 not judged.

    \b
    tpi audit qwen3_8b tp=4 pp=2 cuda_graph=te
    tpi audit recipe=my.py:tuned tp=2 --reference precision=bf16
    tpi audit qwen3_toy seq=64 --against model.recompute_granularity=selective
    tpi audit qwen3_moe_toy --all
    tpi audit qwen3_8b tp=4 --resume-at 10 iters=12
    tpi audit --recorded recordings/tp4 recordings/tp1
    """
    from tp_invariant_recipes.features.audit import workflow as launch

    changed = [*(reference or []), *(against or [])]
    if resume_at is not None and (wrong := [*map(str, recorded or ()), *(["--resume"] if resume else [])]):
        raise ConfigError(f"--resume-at trains anew; leave out {' '.join(wrong)}")
    if card and (resume_at is None or every):
        raise ConfigError("--card describes a resume of one configuration: tpi audit MODEL --resume-at K --card")
    if every or resume is not None:
        if wrong := [*changed, *(map(str, recorded or ()))]:
            raise ConfigError(f"--all chooses its layouts and references itself; leave out {' '.join(wrong)}")
        how: dict[str, Any] = {"at": resume_at, "scripts": script, "exitfirst": exitfirst, "as_json": as_json}
        _all(model, list(overrides or []), directory, resume, **how)
    if recorded is not None:
        if given := [*([model] if model else []), *(overrides or []), *changed]:
            raise ConfigError(f"--recorded judges what is there and trains nothing; leave out {' '.join(given)}")
        finish(launch.recorded(*recorded, directory), as_json=as_json)
    if model is None:
        raise ConfigError("missing MODEL: a model of tpi models, recipe=FILE.py:FUNCTION, or --recorded RUN REFERENCE")
    from tp_invariant_recipes.api import commands

    options: dict[str, Any] = {"resume_at": resume_at, "card": card, "keep": keep, "directory": directory}
    result = commands.audit(model, *(overrides or []), reference=reference or (), against=against or (), **options)
    finish(result, as_json=as_json)


def _all(
    model: str | None,
    overrides: list[str],
    directory: Path | None,
    resume: Path | None,
    *,
    at: int | None,
    scripts: bool,
    exitfirst: bool,
    as_json: bool,
) -> None:
    """Run a campaign, print every verdict as it comes, and end with the status."""
    from tp_invariant_recipes.features.audit import campaign, configurations
    from tp_invariant_recipes.features.audit.result import AuditRun, coloured
    from tp_invariant_recipes.machine.progress import busy, estimate

    if (model is None) == (resume is None):
        raise ConfigError("--all audits a MODEL; --resume DIR continues a stopped one: give one of them")
    needed.check("tpi audit", needed.TRAINING)
    console = terminal.console_of_its_own()
    if resume is not None:
        where, state = campaign.resumed(resume)
    else:
        assert model is not None
        where, state = campaign.new(model, overrides, directory, at)
    terminal.print_line(console, f"audit directory {where.path}")

    first: list[tuple[float, int]] = []

    def show(trial: AuditRun, done: int, total: int) -> None:
        first.append((time.monotonic() - trial.seconds, done))  # the first counts
        settings = " ".join(map(configurations.label, trial.settings))
        count = f"{done} of {total} pairs{estimate(*first[0], done, total)}"
        line = coloured(f"{trial.verdict:<16} {trial.seconds:>4.0f} s  {settings}", trial.verdict) + Text(f"  {count}")
        terminal.print_line(console, line if trial.sound else line + Text(f"\n    {trial.text}"))

    with busy(console, "importing Megatron-Bridge and choosing configurations"):
        bridge.load()
    result = campaign.execute(where, state, show, resume=resume is not None, exitfirst=exitfirst, scripts=scripts)
    finish(result, as_json=as_json)
