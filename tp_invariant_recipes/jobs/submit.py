"""`tpi submit`: compose for the cluster's nodes, check, write the run directory, hand its job to SLURM."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
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
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.jobs import registry, script, slurm_client, states
from tp_invariant_recipes.jobs.script import CellStep, Job
from tp_invariant_recipes.jobs.slurm_client import Partition
from tp_invariant_recipes.launch import memory, plan
from tp_invariant_recipes.launch.train import check as train_check
from tp_invariant_recipes.ledger.run_files import RunFile
from tp_invariant_recipes.multinode import srun_command
from tp_invariant_recipes.runs.lock import locked, locked_empty
from tp_invariant_recipes.runs.matrix_dir import LeftOut
from tp_invariant_recipes.runs.run_dir import RunDir, choose, choose_for_several
from tp_invariant_recipes.workflows import matrix, verify
from tp_invariant_recipes.workflows import sweep as sweeping

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

    kind:     "train", "verify" or "sweep".
    about:    a few words about the nodes and ranks that it needs. taken: the same as numbers.
    memory:   a line about the fullest rank of its largest run.
    cells:    of a verify or sweep, by name, in the order of the array's tasks; empty for a single run.
    scripts:  in the order of submission; the second waits for the end of the first.
    validate: lets Bridge validate the runs. Raises ConfigError.
    write:    writes the runs, before the scripts.
    after:    ids of the jobs that must have ended well before the first of these begins.
    unseen:   what the nodes need and this host cannot check, a line each.
    left_out: combinations of a matrix that no run can have.
    resumed:  whether the directory holds a run, with which the job goes on.
    """

    kind: str
    model: str
    about: str
    taken: Allocation
    memory: str
    directory: RunDir
    cells: tuple[str, ...]
    scripts: tuple[JobScript, ...]
    validate: Callable[[], None]
    write: Callable[[], None]
    after: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    resumed: bool = False

    def options(self, number: int, *ids: str) -> list[str]:
        """sbatch's options beside those of a script. ids: of the jobs before it.

        The second job starts when the first has ended, with or without success.
        """
        waits = f"afterany:{ids[0]}" if number else ":".join(("afterok", *self.after)) if self.after else None
        return ["--kill-on-invalid-dep=yes", f"--dependency={waits}"] if waits else []

    def commands(self) -> list[str]:
        """The command that submits each script, for people."""
        numbered = enumerate(self.scripts)
        return [
            shlex.join(["sbatch", "--parsable", *self.options(number, "JOB"), str(s.file)]) for number, s in numbered
        ]

    def foreseen(self) -> dict[str, Any]:
        """What a dry run prints as JSON; documented in slurm/README.md."""
        return {
            "schema": registry.SCHEMA,
            "kind": self.kind,
            "model": self.model,
            "directory": str(self.directory.path),
            "resumed": self.resumed,
            "nodes": self.taken.nodes,
            "ranks_per_node": self.taken.ranks,
            "gpus_per_node": self.taken.gpus,
            "memory": self.memory,
            "after": list(self.after),
            "cells": list(self.cells),
            "left_out": [asdict(one) for one in self.left_out],
            "unseen": list(self.unseen),
            "jobs": [
                {"role": one.role, "file": str(one.file), "command": command, "script": one.text}
                for one, command in zip(self.scripts, self.commands(), strict=True)
            ],
        }

    def as_dict(self, ids: Sequence[str] = ()) -> dict[str, Any]:
        """The contents of submission.json. ids: of the submitted jobs, in the order of the scripts."""
        done = zip(self.scripts, ids, strict=False)
        return {
            "schema": registry.SCHEMA,
            "kind": self.kind,
            "model": self.model,
            "command": shlex.join(["tpi", *sys.argv[1:]]),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "directory": str(self.directory.path),
            "jobs": [{"id": job, "role": one.role} for one, job in done],
            **({"cells": list(self.cells)} if self.cells else {}),
        }


def train(
    model: str, overrides: Sequence[str], *, after: Sequence[str] = (), dry: bool = False, progress: Progress = None
) -> PlannedSubmission:
    """Plan the job of one run. It writes only the data cache. Raises a TpiError that lists all problems.

    after: jobs to wait for, by any name that `registry.find` takes, or by SLURM's ids.
    dry:   make only the script; neither query SLURM nor prepare data. progress: as for `plan.new`.
    """
    problems, sound = reserved.check("submit", parse_all(overrides))
    composed = _composed(model, sound, problems)
    composed, configs = _layouts(composed, problems)
    _check(configs, problems, dry=dry)
    where = _absolute(choose(composed.config.run.dir, f"{model}-tp{layout.of(composed.config).tp}"))
    found = _single(composed, where, after)
    if dry:
        return found
    planned = plan.resolve(_in_the_job(composed, where), where, progress, here=False)
    return replace(found, validate=partial(train_check, planned), write=partial(plan.write, planned, attempt=False))


def resume(
    run: Path, overrides: Sequence[str], *, after: Sequence[str] = (), dry: bool = False, progress: Progress = None
) -> PlannedSubmission:
    """Plan a job that goes on with a run, wherever that was begun. Raises a TpiError that lists all problems.

    overrides: what is to change, as for `tpi train --resume`. after, dry, progress: as for `train`.
    """
    where = _absolute(RunDir(run.expanduser()))
    before = where.read_run(RunFile)
    problems, sound = reserved.check("submit --resume", parse_all(overrides))
    model = before["model"]
    composed = _composed(model, [*plan.asked_again(before), *sound], problems)
    composed, configs = _layouts(composed, problems)
    _check(configs, problems, dry=dry)
    if not dry:
        _idle(where)
    found = _single(composed, where, after)
    in_the_job = _in_the_job(composed, where)
    planned = plan.resume_run(where.path, in_the_job, progress=progress, here=False, dry=dry)
    about = f"{found.about}, from step {planned.start}"
    return replace(found, about=about, validate=partial(train_check, planned), resumed=True)


def _layouts(composed: Composed, problems: list[str]) -> tuple[Composed, list[RunConfig]]:
    """The run with what every try keeps, and its configurations on the most nodes and the fewest."""
    configs = [composed.config]
    if wrong := elastic.problems(composed.tree):
        problems += wrong
    elif nodes := elastic.span(composed.config):
        composed = replace(composed, overrides=(*composed.overrides, *elastic.kept(composed.tree)))
        fewest = elastic.data_parallel(composed.tree, nodes[0])
        assert fewest is not None  # elastic.problems names those that are too few
        configs.append(typed(elastic.with_dp(composed.tree, fewest)))
    return composed, configs


def _single(composed: Composed, where: RunDir, after: Sequence[str]) -> PlannedSubmission:
    """The job of one run; nothing validates or writes it yet."""
    config, model = composed.config, composed.model
    taken = allocation.of(config)
    about = f"{model}: {taken}" + (", or as many of them as there are" if config.slurm.nodes else "")
    log = _log(config, where, "job-%j.log")
    job = script.training(config, taken, name=f"tpi-{where.path.name}", about=about, log=log)
    text = script.train(job, config, model, _of_the_run(composed), where.path)
    return PlannedSubmission(
        kind=registry.TRAIN,
        model=model,
        about=about,
        taken=taken,
        memory=memory.summary(config, here=False),
        directory=where,
        cells=(),
        scripts=(JobScript(registry.TRAIN, where.script, text),),
        validate=_nothing,
        write=_nothing,
        after=_ids(after),
        unseen=tuple(allocation.unseen(config)),
    )


def _of_the_run(composed: Composed) -> list[Override]:
    return [one for one in composed.overrides if one.field not in ("run.dir", "launcher.kind")]


def _in_the_job(composed: Composed, where: RunDir) -> Composed:
    """The same with the overrides that the job's script has."""
    return replace(composed, overrides=(*_of_the_run(composed), parse(f"run.dir={where.path}"), parse(IN_A_JOB)))


def verification(
    model: str,
    overrides: Sequence[str],
    *,
    against: Path | None,
    directory: Path | None,
    after: Sequence[str] = (),
    dry: bool = False,
    progress: Progress = None,
) -> PlannedSubmission:
    """Plan the jobs of a matrix: an array of the cells, and one job that judges them. Raises as `train` does.

    against, directory: as for `verify.new`. after, dry, progress: as for `train`.
    """
    planning = partial(verify.new, against=against, progress=progress, here=False, dry=dry)
    return _array("verify", planning, model, overrides, directory, after, dry=dry)


def sweep(
    model: str,
    overrides: Sequence[str],
    *,
    directory: Path | None,
    after: Sequence[str] = (),
    dry: bool = False,
    progress: Progress = None,
) -> PlannedSubmission:
    """Plan the jobs of a sweep: an array of the runs, and one job that lists them. Raises as `train` does.

    directory: as for `sweep.new`. after, dry, progress: as for `train`.
    """
    planning = partial(sweeping.new, progress=progress, here=False, dry=dry)
    return _array("sweep", planning, model, overrides, directory, after, dry=dry)


# Command of several runs -> the words of the job that looks at them when all have ended.
LOOKS = {"verify": ("verify", "--recheck"), "sweep": ("sweep", "--results")}


def _array(
    kind: str,
    planning: Callable[..., verify.Verification],
    model: str,
    overrides: Sequence[str],
    directory: Path | None,
    after: Sequence[str],
    *,
    dry: bool,
) -> PlannedSubmission:
    """kind: a key of LOOKS. planning: `verify.new` or `sweep.new`, but for model, overrides and directory."""
    problems, sound = reserved.check("submit", parse_all(overrides))
    axes, _ = matrix.spread(sound, [])
    problems += [
        f"{axis}: the cells are one array of jobs, which has one {axis.key}; submit one {kind} for each"
        + (", and compare them with --against" if kind == "verify" else "")
        for axis in axes
        if axis.key.partition(".")[0] in OF_THE_ARRAY
    ]
    if problems:
        raise ConfigError(listed(problems), problems)
    path = choose_for_several(directory, f"{kind}-{model}").absolute()

    def on(device: str) -> verify.Verification:
        asked = sound if given(sound, "device.kind") else [parse(f"device={device}"), *sound]
        return planning(model, asked, directory=path)

    found = plan.for_nodes(on, lambda found: next(iter(found.plans.values())).config, sound)
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
    does = "compares" if kind == "verify" else "lists"
    judge = _judging(
        job, name=f"{name}-judge", about=f"{model}: {does} the cells", log=_log(config, where, "job-%j.log")
    )
    looks = script.judge(judge, config, LOOKS[kind], path, [path, *reference])
    fullest = max(configs.values(), key=lambda one: estimate(one).rank)
    return PlannedSubmission(
        kind=kind,
        model=model,
        about=about,
        taken=taken,
        memory=memory.summary(fullest, here=False),
        directory=where,
        cells=tuple(configs),
        scripts=(
            JobScript(registry.CELLS, where.script, script.array(job, config, model, steps, path)),
            JobScript(registry.JUDGE, path / "judge.sbatch", looks),
        ),
        validate=partial(verify.check, found),
        write=partial(_write_cells, found),
        after=_ids(after),
        unseen=tuple(dict.fromkeys(line for one in configs.values() for line in allocation.unseen(one))),
        left_out=found.matrix.left_out,
    )


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
    with locked(where) if submission.resumed else locked_empty(where):
        return _execute(submission, made=made)


def _execute(submission: PlannedSubmission, *, made: bool) -> dict[str, Any]:
    where = submission.directory
    ids: list[str] = []
    earlier = {f: f.read_bytes() for f in (where.script, where.submission) if submission.resumed and f.exists()}
    try:
        submission.write()
        where.logs.mkdir(parents=True, exist_ok=True)  # SLURM does not create it, and a job without its log fails
        for one in submission.scripts:
            where.write_text(one.file, one.text)
        where.write(where.submission, submission.as_dict())
        for number, one in enumerate(submission.scripts):
            ids.append(slurm_client.sbatch(one.file, submission.options(number, *ids)))
    except BaseException as error:
        try:
            slurm_client.cancel(ids)
        except RunError as other:
            raise RunError(f"{error}\nand job {ids[0]}, submitted before it, could not be ended: {other}") from error
        if submission.resumed:
            _put_back(where, earlier)
        else:
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
        for problem in (*allocation.problems(config, os.environ, dry=dry), *memory.problems(config, here=False))
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


def _ids(names: Sequence[str]) -> tuple[str, ...]:
    """SLURM's ids of jobs to wait for: of a submission of several jobs the last, which looks at the others.

    Raises RunError. Digits that tpi has not submitted are an id of SLURM's.
    """
    if not names:
        return ()
    known = registry.registered().owners
    foreign = [name for name in names if name.isascii() and name.isdigit() and name not in known]
    ours = registry.find([name for name in names if name not in foreign])
    return (*foreign, *(one.parts[-1].id for one in ours))


def _idle(where: RunDir) -> None:
    """Raises RunError where a job of this run waits or runs: two would train in one directory."""
    if not where.submission.exists():
        return
    found = states.overview(registry.find([str(where.path)]))
    alive = [state for one in found.states for state in one if state.alive]
    if alive:
        job = alive[0].part.id
        raise RunError(
            f"{where.path} has job {job}, which is {alive[0].text}: wait for it, or end it: tpi cancel {job}"
        )


def _nothing() -> None:
    """A dry run checks nothing with Bridge, and writes nothing."""


def _write_cells(found: verify.Verification) -> None:
    found.directory.write_matrix(found.matrix)
    for planned in found.plans.values():
        plan.write(planned, attempt=False)


def _put_back(where: RunDir, earlier: dict[Path, bytes]) -> None:
    """The files of an earlier submission, as they were."""
    for file in (where.script, where.submission):
        if file in earlier:
            write_atomically(file, earlier[file].decode())
        else:
            file.unlink(missing_ok=True)


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
