"""`tpi submit`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tp_invariant_recipes.cli.arguments import ClusterFile, Json, Model, Overrides, with_cluster_file
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.host import terminal

if TYPE_CHECKING:
    from tp_invariant_recipes.jobs.submit import PlannedSubmission


def submit(
    model: Model,
    overrides: Overrides = None,
    cluster_file: ClusterFile = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the script and write nothing; use neither SLURM nor Bridge."),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Train several layouts, as tpi verify does: one job for each, and one job that compares."
        ),
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --verify: compare all runs with this certificate, run directory or ledger."
        ),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", help="With --verify: where to write; default runs/verify-MODEL-DATE-TIME."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Submit a run, or with --verify a matrix of runs, to SLURM.

    Before it writes anything, tpi checks everything that it can check here, and Megatron-Bridge validates the
    configuration. The run directory then holds the configuration and the script (job.sbatch). Standard output has only
    the job's id. The run saves before its time limit; SLURM queues it again, also after a node fails, and it continues
    until it is done.

    \b
    tpi submit qwen3_8b tp=8 save=500 cluster=h100 slurm.time=4:00:00
    tpi submit qwen3_8b tp=4 cluster=h200 slurm.time=60 --dry-run
    tpi submit qwen3_8b tp=1,2,4,8 cluster=h100 slurm.time=60 --verify
    tpi wait $(tpi submit qwen3_toy --cluster-file site.yaml slurm.time=10)
    """
    from tp_invariant_recipes.jobs import submit as launch
    from tp_invariant_recipes.launch import progress

    asked = with_cluster_file(list(overrides or []), cluster_file)
    if not verify and (against is not None or directory is not None):
        raise ConfigError("--against and --dir belong to --verify; the directory of a single run is run.dir=PATH")
    to_person = terminal.console_of_its_own()
    with progress.preparing(to_person) as report:
        if verify:
            planned = launch.verification(
                model, asked, against=against, directory=directory, dry=dry_run, progress=report
            )
        else:
            planned = launch.train(model, asked, dry=dry_run, progress=report)
    console = terminal.console(stderr=True, soft_wrap=True, markup=False)
    if dry_run:
        console.print(_foreseen(planned))
        terminal.print_text(_scripts(planned), end="")
        return
    with progress.busy(to_person, "importing Megatron-Bridge and checking the configuration"):
        unasked = launch.check(planned)
    if unasked is not None:
        console.print(unasked)
    submitted = launch.execute(planned)
    console.print(_said(planned, submitted))
    if as_json:
        terminal.print_json(submitted)
    else:
        terminal.print_text(submitted["jobs"][0]["id"])


def _scripts(planned: "PlannedSubmission") -> str:
    """All scripts; before each but the first a line with its name."""
    first, *others = planned.scripts
    return first.text + "".join(f"# ---- {one.file.name}\n{one.text}" for one in others)


def _foreseen(planned: "PlannedSubmission") -> str:
    return "\n".join(
        [
            f"{planned.about}; nothing is written",
            planned.memory,
            f"would write the run to {planned.directory.path}",
            *(f"would run: {command}" for command in planned.commands()),
        ]
    )


def _said(planned: "PlannedSubmission", submitted: dict[str, Any]) -> str:
    first, *others = (job["id"] for job in submitted["jobs"])
    judged = f"; job {others[0]} compares when all have ended" if others else ""
    return "\n".join(
        [
            f"job {first}: {planned.about}{judged}",
            f"run directory {planned.directory.path}",
            f"follow it: tpi logs -f {first}   all jobs: tpi jobs   wait for the end: tpi wait {first}",
        ]
    )
