# SPDX-License-Identifier: Apache-2.0
"""`tpi submit`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tp_invariant_recipes.cli.arguments import (
    Json,
    Overrides,
    TrustRecipe,
    flag,
    option,
    optional_model,
    resumed_words,
    with_model,
)
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.machine import terminal

if TYPE_CHECKING:
    from tp_invariant_recipes.jobs.script import PlannedSubmission


def submit(
    model: Annotated[str | None, optional_model("needed with --resume")] = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, flag("Print the script and write nothing; use neither SLURM nor Bridge.", "--dry-run")
    ] = False,
    resume: Annotated[
        Path | None, option("RUN", "Continue this run in a job, from its newest finished checkpoint.")
    ] = None,
    after: Annotated[
        list[str] | None, option("JOB", "Start when this job has completed: an id, a run's name or its directory.")
    ] = None,
    verify: Annotated[
        bool,
        flag("Train several layouts, as tpi verify does: one job for each, and one job that compares.", "--verify"),
    ] = False,
    against: Annotated[
        Path | None, option("FILE", "With --verify: compare all runs with this certificate, run directory or ledger.")
    ] = None,
    directory: Annotated[
        Path | None, option("DIR", "With --verify: where to write; default runs/verify-MODEL-….", "--dir")
    ] = None,
    _trusted: TrustRecipe = False,
    as_json: Json = False,
) -> None:
    """Submit a run to SLURM, or several: --verify.

    Before it writes anything, tpi checks everything that it can check here, and Megatron-Bridge validates the
    configuration. The run directory then holds the configuration and the script (job.sbatch). Standard output has only
    the job's id. The run saves before its time limit. SLURM requeues it, also after a node fails, and it continues
    until it is complete.

    \b
    tpi submit qwen3_8b tp=8 save=500 cluster=h100 slurm.time=4:00:00
    tpi submit qwen3_8b tp=4 cluster=h200 slurm.time=60 --dry-run
    tpi submit qwen3_8b tp=2,4,8 cluster=h200 slurm.time=60 --verify
    tpi submit --resume runs/a slurm.time=8:00:00 --after 12
    tpi wait $(tpi submit qwen3_toy cluster=h100 slurm.time=10)
    """
    from tp_invariant_recipes.jobs import submit as launch
    from tp_invariant_recipes.launch import progress

    if resume is not None and verify:
        raise ConfigError("--resume and --verify are different kinds of submission: give one")
    if against is not None and not verify:
        raise ConfigError("--against belongs to --verify")
    if directory is not None and not verify:
        raise ConfigError("--dir belongs to --verify; the directory of a single run is run.dir=PATH")
    requested = list(overrides or [])
    if resume is not None:
        model, requested = resumed_words(model, requested)
    model, requested = with_model(model, requested)
    to_person = terminal.console_of_its_own()
    with progress.preparing(to_person, here=False, dry=dry_run) as how:
        options: dict[str, Any] = {"after": after or [], "how": how}
        if resume is not None:
            planned = launch.resume(resume, requested, model=model, **options)
        elif model is None:
            raise ConfigError("name a model to train (tpi models lists them), or a run to continue: --resume RUN")
        elif verify:
            planned = launch.several(model, requested, directory=directory, against=against, **options)
        else:
            planned = launch.train(model, requested, **options)
    console = terminal.console(stderr=True, soft_wrap=True, markup=False)
    if planned.completed:
        console.print(planned.completed)
        if as_json:
            terminal.print_json({"jobs": []})
        return
    if dry_run and as_json:
        terminal.print_json(planned.as_json(), indent=2)
        return
    if dry_run:
        console.print(_plan_text(planned))
        first, *others = planned.scripts
        terminal.print_text(
            first.text + "".join(f"# ---- {script.file.name}\n{script.text}" for script in others), end=""
        )
        return
    _submit(planned, to_person, console, as_json=as_json)


def _submit(planned: "PlannedSubmission", to_person: Any, console: Any, *, as_json: bool) -> None:
    from tp_invariant_recipes.jobs.script import check, execute
    from tp_invariant_recipes.machine.progress import busy

    with busy(to_person, "importing Megatron-Bridge and checking the configuration"):
        remark = check(planned)
    if remark is not None:
        console.print(remark)
    submitted = execute(planned)
    console.print(_confirmation(planned, submitted))
    if as_json:
        terminal.print_json(submitted)
    else:
        terminal.print_text(submitted["jobs"][0]["id"])


def _plan_text(planned: "PlannedSubmission") -> str:
    return "\n".join(
        [
            f"{planned.about}; nothing is written",
            planned.memory,
            f"would {'go on in' if planned.resumed else 'write the run to'} {planned.directory.path}",
            *_remarks(planned),
            *(f"would run: {command}" for command in planned.commands()),
        ]
    )


def _remarks(planned: "PlannedSubmission") -> list[str]:
    """Return the jobs that it waits for, the combinations left out, what this host cannot check, and warnings."""
    waits = [f"waits until job {' and '.join(planned.after)} has ended well"] if planned.after else []
    omitted = [f"left out: {combination.label}: {combination.why}" for combination in planned.omitted]
    warnings = [f"warning: {line}" for line in planned.warnings]
    return [*waits, *omitted, *(f"not checked: {line}" for line in planned.unseen), *warnings]


def _confirmation(planned: "PlannedSubmission", submitted: dict[str, Any]) -> str:
    first, *others = (job["id"] for job in submitted["jobs"])
    judged = f"; job {others[0]} compares when all have ended" if others else ""
    return "\n".join(
        [
            f"job {first}: {planned.about}{judged}",
            *_remarks(planned),
            f"run directory {planned.directory.path}",
            f"follow it: tpi logs -f {first}   all jobs: tpi jobs   wait for the end: tpi wait {first}",
        ]
    )
