"""`tpi submit`: compose for the cluster's nodes, check, write the run directory, hand its job to SLURM."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from tp_invariant_recipes.config import allocation, elastic, layout, reserved
from tp_invariant_recipes.config.allocation import Allocation
from tp_invariant_recipes.config.compose import Composed, compose
from tp_invariant_recipes.config.memory import estimate
from tp_invariant_recipes.config.nearest import nearest
from tp_invariant_recipes.config.overrides import Override, cluster_files, given, parse, parse_all
from tp_invariant_recipes.config.sections import RunConfig, typed
from tp_invariant_recipes.errors import ConfigError, RunError, TpiError, listed
from tp_invariant_recipes.jobs import registry, script, slurm_client
from tp_invariant_recipes.jobs.script import CellStep, Job
from tp_invariant_recipes.jobs.slurm_client import Partition
from tp_invariant_recipes.launch import memory, plan
from tp_invariant_recipes.launch.train import check as train_check
from tp_invariant_recipes.multinode import srun_command
from tp_invariant_recipes.runs.lock import locked_empty
from tp_invariant_recipes.runs.run_dir import RunDir, choose, choose_for_several
from tp_invariant_recipes.workflows import matrix, verify

IN_A_JOB = "launcher=slurm"
# Sections of which a verify has one value a key: its cells are tasks of one array, which asks for the same for all.
OF_THE_ARRAY = ("cluster", "slurm")

JUDGE_TIME = "30:00"  # time limit of the comparison, or the cells' time limit if that is shorter
ON_THE_NODE = Path("/tmp")  # folder of the logs if nodes do not share the run directory

Progress = Callable[[int, int], None] | None


@dataclass(frozen=True)
class JobScript:
    """One job. role: as in submission.json: "train", "cells" or "judge"."""

    role: str
    file: Path
    text: str


@dataclass(frozen=True)
class PlannedSubmission:
    """A submission before it is made.

    about:    a few words about the nodes and ranks that it needs.
    memory:   a line about the fullest rank of its largest run.
    cells:    of a verify, by name, in the order of the array's tasks; empty for a single run.
    scripts:  in the order of submission; the second waits for the end of the first.
    validate: lets Bridge validate the runs. Raises ConfigError.
    write:    writes the runs, before the scripts.
    """

    model: str
    about: str
    memory: str
    directory: RunDir
    cells: tuple[str, ...]
    scripts: tuple[JobScript, ...]
    validate: Callable[[], None]
    write: Callable[[], None]

    def commands(self) -> list[str]:
        """The command that submits each script, for people."""
        numbered = enumerate(self.scripts)
        return [shlex.join(["sbatch", "--parsable", *_options(number, "JOB"), str(s.file)]) for number, s in numbered]

    def as_dict(self, ids: Sequence[str] = ()) -> dict[str, Any]:
        """The contents of submission.json. ids: of the submitted jobs, in the order of the scripts."""
        done = zip(self.scripts, ids, strict=False)
        return {
            "schema": registry.SCHEMA,
            "kind": "verify" if self.cells else "train",
            "model": self.model,
            "command": shlex.join(["tpi", *sys.argv[1:]]),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "directory": str(self.directory.path),
            "jobs": [{"id": job, "role": one.role} for one, job in done],
            **({"cells": list(self.cells)} if self.cells else {}),
        }


def train(model: str, overrides: Sequence[str], *, dry: bool = False, progress: Progress = None) -> PlannedSubmission:
    """Plan the job of one run. It writes only the data cache. Raises a TpiError that lists all problems.

    dry: make only the script; neither query SLURM nor prepare data. progress: as for `plan.new`.
    """
    problems, sound = reserved.check("submit", parse_all(overrides))
    composed = _composed(model, sound, problems)
    configs = [composed.config]
    if wrong := elastic.problems(composed.tree):
        problems += wrong
    elif nodes := elastic.span(composed.config):
        composed = replace(composed, overrides=(*composed.overrides, *elastic.kept(composed.tree)))
        fewest = elastic.data_parallel(composed.tree, nodes[0])
        assert fewest is not None  # elastic.problems names those that are too few
        configs.append(typed(elastic.with_dp(composed.tree, fewest)))
    _check(configs, problems, dry=dry)
    where = _absolute(choose(composed.config.run.dir, f"{model}-tp{layout.of(composed.config).tp}"))
    taken = allocation.of(composed.config)
    about = f"{model}: {taken}" + (", or as many of them as there are" if composed.config.slurm.nodes else "")
    log = _log(composed.config, where, "job-%j.log")
    job = script.training(composed.config, taken, name=f"tpi-{where.path.name}", about=about, log=log)
    of_the_run = [one for one in composed.overrides if one.field not in ("run.dir", "launcher.kind")]
    text = script.train(job, composed.config, model, of_the_run, where.path)

    scripts = (JobScript(registry.TRAIN, where.script, text),)
    needs = memory.summary(composed.config, here=False)
    if dry:
        return PlannedSubmission(model, about, needs, where, (), scripts, _nothing, _nothing)
    said = (*of_the_run, parse(f"run.dir={where.path}"), parse(IN_A_JOB))
    in_the_job = replace(composed, overrides=said)
    planned = plan.resolve(in_the_job, where, progress, here=False)
    validate, write = partial(train_check, planned), partial(plan.write, planned, attempt=False)
    return PlannedSubmission(model, about, needs, where, (), scripts, validate, write)


def verification(
    model: str,
    overrides: Sequence[str],
    *,
    against: Path | None,
    directory: Path | None,
    dry: bool = False,
    progress: Progress = None,
) -> PlannedSubmission:
    """Plan the jobs of a matrix: an array of the cells, and one job that judges them. Raises as `train` does.

    against, directory: as for `verify.new`.
    """
    problems, sound = reserved.check("submit", parse_all(overrides))
    axes, _ = matrix.spread(sound, [])
    problems += [
        f"{axis}: the cells are one array of jobs, which has one {axis.key}; submit one verify for each, and compare "
        f"them with --against"
        for axis in axes
        if axis.key.partition(".")[0] in OF_THE_ARRAY
    ]
    if problems:
        raise ConfigError(listed(problems), problems)
    path = choose_for_several(directory, f"verify-{model}").absolute()

    def planning(device: str) -> verify.Verification:
        asked = sound if given(sound, "device.kind") else [parse(f"device={device}"), *sound]
        return verify.new(model, asked, against=against, directory=path, progress=progress, here=False)

    found = plan.for_nodes(planning, lambda found: next(iter(found.plans.values())).config, sound)
    configs = {name: planned.composed.config for name, planned in found.plans.items()}
    config = next(iter(configs.values()))
    if config.slurm.nodes is not None:
        problems.append(f"slurm.nodes={config.slurm.nodes}: each cell has a layout of its own; leave it out")
    if not config.cluster.shared_files:
        problems.append("cluster.shared_files=false: the job that compares the cells would not see their ledgers")
    _check(list(configs.values()), problems, dry=dry)
    taken = _largest(map(allocation.of, configs.values()))
    about = f"{model}: an array of {len(configs)} cells, {taken} at most"
    name = f"tpi-{path.name}"
    where = found.directory
    job = script.training(config, taken, name=name, about=about, log=_log(config, where, "job-%A_%a.log"))
    reference = [] if found.matrix.against is None else [Path(found.matrix.against)]
    needed = [path, *cluster_files(sound)]
    steps = [
        CellStep(cell.name, ("srun", *srun_command.arguments(configs[cell.name], needed)), cell.overrides)
        for cell in found.matrix.cells
    ]
    judge = _judging(
        job, name=f"{name}-judge", about=f"{model}: compares the cells", log=_log(config, where, "job-%j.log")
    )
    cells = JobScript(registry.CELLS, where.script, script.array(job, config, model, steps, path))
    compare = JobScript(registry.JUDGE, path / "judge.sbatch", script.judge(judge, config, path, [path, *reference]))
    validate, write = partial(verify.check, found), partial(_write_cells, found)
    fullest = max(configs.values(), key=lambda one: estimate(one).rank)
    needs = memory.summary(fullest, here=False)
    return PlannedSubmission(model, about, needs, where, tuple(configs), (cells, compare), validate, write)


def check(submission: PlannedSubmission) -> str | None:
    """Let Bridge validate the runs. Imports it, 10 to 20 s. Raises ConfigError.

    returns: why Bridge cannot validate on this machine, which may lack a driver or library of the nodes. They will.
    """
    try:
        submission.validate()
    except TpiError:
        raise
    except Exception as error:
        return f"the nodes will ask Megatron-Bridge, which fails here: {type(error).__name__}: {error}"
    return None


def execute(submission: PlannedSubmission) -> dict[str, Any]:
    """Write the directory and submit. Returns the contents of submission.json. Raises RunError.

    If SLURM refuses, the directory is removed, so that the corrected command can be repeated.
    """
    where = submission.directory
    made = not where.path.exists()
    with locked_empty(where):
        return _execute(submission, made=made)


def _execute(submission: PlannedSubmission, *, made: bool) -> dict[str, Any]:
    where = submission.directory
    ids: list[str] = []
    try:
        submission.write()
        where.logs.mkdir(parents=True, exist_ok=True)  # SLURM does not create it, and a job without its log fails
        for one in submission.scripts:
            where.write_text(one.file, one.text)
        where.write(where.submission, submission.as_dict())
        for number, one in enumerate(submission.scripts):
            ids.append(slurm_client.sbatch(one.file, _options(number, *ids)))
    except BaseException as error:
        try:
            slurm_client.cancel(ids)
        except RunError as other:
            raise RunError(f"{error}\nand job {ids[0]}, submitted before it, could not be ended: {other}") from error
        _remove(where.path, whole=made)
        raise
    found = submission.as_dict(ids)
    try:
        registry.remember(where.path, ids)
        where.write(where.submission, found)
    except RunError as error:
        raise RunError(f"job {' and '.join(ids)} is submitted, but tpi jobs may not find it: {error}") from error
    return found


def _composed(model: str, overrides: Sequence[Override], problems: list[str]) -> Composed:
    """Raises ConfigError that lists `problems` and what is wrong beside them."""
    in_a_job = parse(IN_A_JOB)

    def composing(device: str) -> Composed:
        said = [] if given(overrides, "device.kind") else [parse(f"device={device}")]
        return compose(model, [*overrides, *said, in_a_job])

    try:
        return plan.for_nodes(composing, lambda composed: composed.config, overrides)
    except ConfigError as error:
        found = [*problems, *error.problems]
        raise ConfigError(listed(found), found) from error


def _check(configs: Sequence[RunConfig], problems: list[str], *, dry: bool) -> None:
    """Raises ConfigError that lists `problems` and what is wrong with a job of these runs.

    dry: do not query SLURM.
    """
    wrong = dict.fromkeys(
        problem
        for config in configs
        for problem in (*allocation.problems(config, os.environ), *memory.problems(config, here=False))
    )
    problems = [*problems, *wrong]
    if not dry:
        try:
            there = slurm_client.partitions()
        except RunError as error:
            problems.append(str(error))
        else:
            problems += dict.fromkeys(problem for config in configs for problem in unfit(config, there))
    if problems:
        raise ConfigError(listed(problems), problems)


def unfit(config: RunConfig, there: Sequence[Partition]) -> list[str]:
    """The reasons why a job of this tree would wait forever in its partitions, although SLURM accepts it."""
    asked = config.slurm.partition or os.environ.get("SBATCH_PARTITION")
    names = asked.split(",") if asked else [p.name for p in there if p.default]
    known = {partition.name: partition for partition in there}
    listing = ", ".join(f"{p.name}{' (default)' if p.default else ''}" for p in there)
    if not names:
        return [f"this cluster has no default partition; set slurm.partition to one of: {listing}"]
    problems = [
        f"slurm.partition={asked}: there is no {name}{nearest(name, known)}; there are: {listing}"
        for name in names
        if name not in known
    ]
    if not problems:
        chosen = [known[name] for name in names]
        problems = [problem for rule in (_too_long, _too_many) if (problem := rule(config, chosen, ",".join(names)))]
    return problems


def _too_long(config: RunConfig, chosen: Sequence[Partition], names: str) -> str | None:
    limits = [partition.seconds for partition in chosen]
    longest = None if None in limits else max(seconds for seconds in limits if seconds is not None)
    try:
        asked = allocation.parse_time(config.slurm.time or "")
    except ValueError:  # it has been said already
        return None
    if longest is None or asked <= longest:
        return None
    return f"slurm.time={config.slurm.time}: partition {names} allows {timedelta(seconds=longest)}"


def _too_many(config: RunConfig, chosen: Sequence[Partition], names: str) -> str | None:
    taken, most = allocation.of(config), max(partition.nodes for partition in chosen)
    if taken.nodes <= most:
        return None
    return f"{taken} are needed, and partition {names} has {most}; lower tp, pp, cp or dp"


def _absolute(run_dir: RunDir) -> RunDir:
    return RunDir(run_dir.path.absolute())


def _log(config: RunConfig, where: RunDir, name: str) -> str:
    """The job's output: among the logs of the run; on the first node if the nodes do not share these."""
    if config.cluster.shared_files:
        return script.log_in(where.logs, name)
    return script.log_in(ON_THE_NODE, f"tpi-%u-{name}")


def _largest(all_taken: Iterable[Allocation]) -> Allocation:
    """Resources that are enough for each of these."""
    cells = list(all_taken)
    return Allocation(max(c.nodes for c in cells), max(c.ranks for c in cells), max(c.gpus for c in cells))


def _judging(job: Job, *, name: str, about: str, log: str) -> Job:
    """A judge's job: one processor of one node, for a limited time, in the cells' partition."""
    shorter = allocation.parse_time(job.time) < allocation.parse_time(JUDGE_TIME)
    limit = job.time if shorter else JUDGE_TIME
    return replace(
        job, name=name, about=about, nodes=1, gres=None, cpus=None, whole=False, time=limit, save_before=None, log=log
    )


def _options(number: int, *ids: str) -> list[str]:
    """sbatch's options beside the script's: the second job starts when the first has ended, with or without success."""
    return ["--kill-on-invalid-dep=yes", f"--dependency=afterany:{ids[0]}"] if number else []


def _nothing() -> None:
    """A dry run checks nothing with Bridge, and writes nothing."""


def _write_cells(found: verify.Verification) -> None:
    found.directory.write_matrix(found.matrix)
    for planned in found.plans.values():
        plan.write(planned, attempt=False)


def _remove(path: Path, *, whole: bool) -> None:
    """Remove the contents of a directory that was empty before; if `whole`, the directory itself."""
    if whole:
        shutil.rmtree(path, ignore_errors=True)
        return
    for entry in path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
