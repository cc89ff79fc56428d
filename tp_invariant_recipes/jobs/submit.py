# SPDX-License-Identifier: Apache-2.0
"""`tpi submit` plans: compose for the cluster's nodes, check, render the scripts. `script.py` submits them."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from tp_invariant_recipes.check.hosts import job as job_rules
from tp_invariant_recipes.check.hosts.inputs import input_problems
from tp_invariant_recipes.check.hosts.job import PendingJob
from tp_invariant_recipes.config.compose import Composed, compose
from tp_invariant_recipes.config.overrides import (
    Override,
    check_reserved,
    cluster_files,
    given,
    parse,
    parse_all,
)
from tp_invariant_recipes.errors import ConfigError, RunError, lines, listed, refuse
from tp_invariant_recipes.features.verify import workflow as verify
from tp_invariant_recipes.features.verify.configurations import spread
from tp_invariant_recipes.jobs import registry, script, slurm_client, states
from tp_invariant_recipes.jobs.script import Job, JobScript, PlannedSubmission
from tp_invariant_recipes.jobs.slurm_client import Partition
from tp_invariant_recipes.launch import plan, record, trust
from tp_invariant_recipes.launch.plan import TO_SUBMIT, Planning
from tp_invariant_recipes.launch.record import RunRequest
from tp_invariant_recipes.launch.resume import (
    completed_text,
    overrides_to_continue,
    resume_run,
    resumes_model,
    with_groups,
)
from tp_invariant_recipes.launch.train import check as train_check
from tp_invariant_recipes.ledger.run_files import RunFile
from tp_invariant_recipes.runs.run_dir import RunDir, choose, choose_for_several
from tp_invariant_recipes.settings import run_config
from tp_invariant_recipes.settings.keys import nearest
from tp_invariant_recipes.settings.run_config import Allocation, RunConfig
from tp_invariant_recipes.sizing import available_memory
from tp_invariant_recipes.sizing.memory import estimate

IN_A_JOB = "launcher=slurm"
# The configurations of a sweep are tasks of one array, so all of them have the same values in these sections.
ARRAY_SECTIONS = ("cluster", "slurm")

JUDGE_TIME = "30:00"  # time limit of the comparison, or the configurations' time limit if that is shorter


def train(
    model: str, overrides: Sequence[str], *, after: Sequence[str] = (), how: Planning = TO_SUBMIT
) -> PlannedSubmission:
    """Plan the job of one run. It writes only the data cache. Raises a TpiError that lists all problems.

    after: jobs to wait for, by any name that `registry.find` takes, or by SLURM's ids.
    how:   if dry, make only the script; neither query SLURM nor prepare data.
    """
    problems, sound = check_reserved("submit", parse_all(overrides))
    RunRequest(model, tuple(sound)).check_new_dir()
    composed = _composed(model, sound, problems, also=None if how.dry else partial(input_problems, here=False))
    _check_fit([composed.config], problems, dry=how.dry)
    path = choose(composed.config.run.dir, f"{model}-tp{composed.config.layout.tp}").path
    where = RunDir(path.absolute())
    submission = _single(composed, where, after)
    if how.dry:
        return submission
    planned = plan.resolve(_job_run(composed, where), where, how)
    return replace(
        submission, validate=partial(train_check, planned), write=partial(record.write, planned, attempt=False)
    )


def resume(
    run: Path,
    overrides: Sequence[str],
    *,
    model: str | None = None,
    after: Sequence[str] = (),
    how: Planning = TO_SUBMIT,
) -> PlannedSubmission:
    """Plan a job that continues a run, wherever it began. Raises a TpiError that lists all problems.

    overrides, model: the changes, and the run's own recipe, as for `tpi train --resume`. after, how: as for `train`.
    """
    where = RunDir(run.expanduser().absolute())
    before = where.read_run(RunFile)
    problems, sound = check_reserved("submit --resume", parse_all(overrides))
    continued = overrides_to_continue(where, before, sound, typed_model=resumes_model(run, model, before))
    composed = _composed(before.model, with_groups(before, continued), problems)
    _check_fit([composed.config], problems, dry=how.dry)
    if not how.dry:
        _check_no_live_job(where)
    submission = _single(composed, where, after)
    planned = resume_run(where.path, _job_run(composed, where), how)
    about = f"{submission.about}, from step {planned.start}"
    done = completed_text(planned) if planned.completed else None
    return replace(submission, about=about, validate=partial(train_check, planned), resumed=True, completed=done)


def _single(composed: Composed, where: RunDir, after: Sequence[str]) -> PlannedSubmission:
    """Return the job of one run; nothing validates or writes it yet."""
    config, model = composed.config, composed.model
    allocated = run_config.allocation_of(config)
    about = f"{model}: {allocated}"
    log = script.log_in(where.logs, "job-%j.log")
    job = script.training(config, allocated, name=f"tpi-{where.path.name}", about=about, log=log)
    text = script.train(job, config, model, _run_overrides(composed), where.path)
    return PlannedSubmission(
        model=model,
        about=about,
        allocated=allocated,
        memory=available_memory.summary(config, here=False),
        directory=where,
        scripts=(JobScript(registry.TRAIN, where.script, text),),
        after=_ids(after),
        unseen=tuple(lines(job_rules.unseen(config))),
        warnings=_warnings({"": config}),
    )


def _run_overrides(composed: Composed) -> list[Override]:
    return [override for override in composed.overrides if override.field not in ("run.dir", "launcher.kind")]


def _job_run(composed: Composed, where: RunDir) -> Composed:
    """Return the run composed with the overrides that the job's script has."""
    return replace(composed, overrides=(*_run_overrides(composed), parse(f"run.dir={where.path}"), parse(IN_A_JOB)))


def several(
    model: str,
    overrides: Sequence[str],
    *,
    directory: Path | None,
    against: Path | None = None,
    after: Sequence[str] = (),
    how: Planning = TO_SUBMIT,
) -> PlannedSubmission:
    """Plan the jobs of a verify: an array of the runs, and one job that judges them.

    directory, against: as for `verify.new`. after, how: as for `train`. Raises as `train` does.
    """
    problems, sound = check_reserved("submit", parse_all(overrides))
    axes, _ = spread(sound, [])
    problems += [
        f"{axis}: the configurations are one array of jobs, which has one {axis.key}; submit one verify for each, "
        "and compare them with --against"
        for axis in axes
        if axis.key.partition(".")[0] in ARRAY_SECTIONS
    ]
    refuse(problems)
    path = choose_for_several(directory, f"verify-{model}").absolute()

    def on(device: str) -> verify.Verification:
        requested = sound if given(sound, "device.kind") else [parse(f"device={device}"), *sound]
        return verify.new(model, requested, against=against, directory=path, how=how)

    verification = plan.for_nodes(on, lambda verification: next(iter(verification.plans.values())).config, sound)
    configs = {name: planned.composed.config for name, planned in verification.plans.items()}
    _check_fit(list(configs.values()), [], dry=how.dry)
    cells = [run_config.allocation_of(config) for config in configs.values()]
    allocated = Allocation(max(c.nodes for c in cells), max(c.ranks for c in cells), max(c.gpus for c in cells))
    fullest = max(configs.values(), key=lambda config: estimate(config).rank)
    about = f"{model}: an array of {len(configs)} configurations, {allocated} at most"
    return PlannedSubmission(
        model=model,
        about=about,
        allocated=allocated,
        memory=available_memory.summary(fullest, here=False),
        directory=verification.directory,
        cells=tuple(configs),
        scripts=_array_scripts(model, verification, allocated, about, cluster_files(sound)),
        validate=partial(verify.check, verification),
        write=partial(_write_cells, verification),
        after=_ids(after),
        unseen=tuple(dict.fromkeys(line for config in configs.values() for line in lines(job_rules.unseen(config)))),
        omitted=verification.matrix.omitted,
        warnings=_warnings({cell.label: configs[cell.name] for cell in verification.matrix.cells}),
    )


def _array_scripts(
    model: str, verification: verify.Verification, allocated: Allocation, about: str, files: Sequence[Path]
) -> tuple[JobScript, JobScript]:
    """Return the script of the array, and the one of the job that judges the configurations.

    files: the cluster's own.
    """
    configs = {name: planned.composed.config for name, planned in verification.plans.items()}
    config, where, matrix = next(iter(configs.values())), verification.directory, verification.matrix
    path, name = where.path, f"tpi-{where.path.name}"
    job = script.training(config, allocated, name=name, about=about, log=script.log_in(where.logs, "job-%A_%a.log"))
    array = script.array(job, configs, model, matrix.cells, [path, *files])
    shorter = job_rules.parse_time(job.time) < job_rules.parse_time(JUDGE_TIME)
    compares, log = f"{model}: compares the configurations", script.log_in(where.logs, "job-%j.log")
    judge = Job(f"{name}-judge", compares, log, job.time if shorter else JUDGE_TIME, job.slurm)
    reference = [] if matrix.against is None else [Path(matrix.against)]
    return (
        JobScript(registry.CELLS, where.script, array),
        JobScript(registry.JUDGE, path / "judge.sbatch", script.judge(judge, config, path, [path, *reference])),
    )


def _composed(
    model: str,
    overrides: Sequence[Override],
    problems: list[str],
    also: Callable[[RunConfig], list[str]] | None = None,
) -> Composed:
    """Compose a run. also: as for `compose`. Raises ConfigError that lists `problems` and those of the composition."""
    in_a_job = parse(IN_A_JOB)

    def composing(device: str) -> Composed:
        device_override = [] if given(overrides, "device.kind") else [parse(f"device={device}")]
        return compose(model, [*overrides, *device_override, in_a_job], also=also)

    try:
        return plan.for_nodes(composing, lambda composed: composed.config, overrides)
    except ConfigError as error:
        all_problems = [*problems, *error.problems]
        raise ConfigError(listed(all_problems), all_problems) from error


def _check_fit(configs: Sequence[RunConfig], problems: list[str], *, dry: bool) -> None:
    """Raise ConfigError that lists `problems` and the problems of a job of these runs.

    dry: do not query SLURM.
    """
    wrong = dict.fromkeys(
        problem
        for config in configs
        for problem in (
            *lines(job_rules.check_job(PendingJob(config, os.environ, dry))),
            *available_memory.problems(config, here=False),
        )
    )
    problems = [*problems, *wrong]
    if not dry:
        try:
            there = slurm_client.partitions()
        except RunError as error:
            problems.append(str(error))
        else:
            problems += dict.fromkeys(problem for config in configs for problem in unfit(config, there))
    refuse(problems)


def _warnings(configs: Mapping[str, RunConfig]) -> tuple[str, ...]:
    """Return what may end these runs early, although nothing refuses them. configs: by label; "" of a single run."""
    tight = {label: available_memory.warning(config, here=False) for label, config in configs.items()}
    told = [f"{label}: {line}" if label else line for label, line in tight.items() if line]
    return (*told, *dict.fromkeys(line for config in configs.values() for line in lines(job_rules.warnings(config))))


def unfit(config: RunConfig, there: Sequence[Partition]) -> list[str]:
    """Return the reasons why a job of this tree would wait forever in its partitions, although SLURM accepts it."""
    requested = config.slurm.partition or os.environ.get("SBATCH_PARTITION")
    names = requested.split(",") if requested else [p.name for p in there if p.default]
    known = {partition.name: partition for partition in there}
    listing = ", ".join(f"{p.name}{' (default)' if p.default else ''}" for p in there)
    if not names:
        return [f"this cluster has no default partition; set slurm.partition to one of: {listing}"]
    problems = [
        f"slurm.partition={requested}: there is no {name}{nearest(name, known)}; there are: {listing}"
        for name in names
        if name not in known
    ]
    if problems:
        return problems
    limits, chosen = [known[name].seconds for name in names], ",".join(names)
    longest = None if None in limits else max(seconds for seconds in limits if seconds is not None)
    with suppress(ValueError):  # job_rules reports it
        if longest is not None and job_rules.parse_time(config.slurm.time or "") > longest:
            problems.append(f"slurm.time={config.slurm.time}: partition {chosen} allows {timedelta(seconds=longest)}")
    allocated, most = run_config.allocation_of(config), max(known[name].nodes for name in names)
    if allocated.nodes > most:
        problems.append(f"{allocated} are needed, and partition {chosen} has {most}; lower tp, pp, cp or dp")
    return problems


def _ids(names: Sequence[str]) -> tuple[str, ...]:
    """SLURM's ids of jobs to wait for: of a submission of several jobs the last, which judge_script at the others.

    Raises RunError. Digits that tpi has not submitted are an id of SLURM's.
    """
    if not names:
        return ()
    known = dict(registry.registered())
    foreign = [name for name in names if name.isascii() and name.isdigit() and name not in known]
    registered = registry.find([name for name in names if name not in foreign])
    return (*foreign, *(submission.parts[-1].id for submission in registered))


def _check_no_live_job(where: RunDir) -> None:
    """Raise RunError if a job of this run waits or runs: two jobs would train in one directory."""
    if not where.submission.exists():
        return
    known, _ = states.overview(registry.find([str(where.path)]))
    if alive := next((state for state in known if state.alive), None):
        job = alive.part.id
        raise RunError(f"{where.path} has job {job}, which is {alive.text}: wait for it, or end it: tpi cancel {job}")


def _write_cells(verification: verify.Verification) -> None:
    verification.directory.write_matrix(trust.sealed(verification.matrix))
    for planned in verification.plans.values():
        record.write(planned, attempt=False)
