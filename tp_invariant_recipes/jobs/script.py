# SPDX-License-Identifier: Apache-2.0
"""The scripts that SLURM runs, from the templates in `slurm/`: how they are made, and how they are submitted."""

import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tp_invariant_recipes.config.overrides import Override, cluster_files, texts
from tp_invariant_recipes.errors import ConfigError, RunError, TpiError
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.jobs import registry, slurm_client
from tp_invariant_recipes.multinode import srun
from tp_invariant_recipes.runs.lock import locked, locked_empty
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.runs.sweep_dir import Configuration, Omission
from tp_invariant_recipes.settings.run_config import Allocation, RunConfig, ranks_per_node
from tp_invariant_recipes.settings.sections import SlurmSettings
from tp_invariant_recipes.text import single_line

_PACKAGE = Path(__file__).resolve().parents[1]
_PLAIN = re.compile(r"[\w@%+=:,./\[\]*&|()-]+")  # needs no quotes on an #SBATCH line


@dataclass(frozen=True)
class Job:
    """The resources that a script requests from SLURM.

    about: a sentence for people who read the script.
    log:   the file of its output, as for sbatch's --output.
    time:  its time limit.
    slurm: account, partition, qos, options and setup of all jobs.
    gres:  of each node, such as "gpu:8"; None: none. cpus: of each node; None: the site's default.
    whole: whether the job has its nodes to itself.
    """

    name: str
    about: str
    log: str
    time: str
    slurm: SlurmSettings
    nodes: int = 1
    gres: str | None = None
    cpus: int | None = None
    whole: bool = False


def training(config: RunConfig, allocated: Allocation, *, name: str, about: str, log: str) -> Job:
    """Return the job of a run of this configuration. allocated: the part of the cluster that it needs."""
    cluster, slurm = config.cluster, config.slurm
    assert slurm.time is not None  # check/hosts/job.py refuses a job without
    kind = f"gpu:{cluster.gpu_type}" if cluster.gpu_type else "gpu"
    gres = f"{kind}:{allocated.gpus}" if allocated.gpus else None
    cpus = None if allocated.gpus else allocated.ranks  # on a CPU one thread a rank computes
    # By default SLURM would give a node's only task one processor, and memory in proportion.
    whole = slurm.exclusive or allocated.ranks == ranks_per_node(config)
    return Job(name, about, log, slurm.time, slurm, allocated.nodes, gres, cpus, whole)


def train(job: Job, config: RunConfig, model: str, overrides: Sequence[Override], run: Path) -> str:
    """Return the script of one run. overrides: all but run.dir and launcher."""
    srun_ = ("srun", *srun.arguments(config, [run, *cluster_files(overrides)]))
    words = texts(overrides)
    return _render("train", job=job, srun=srun_, tpi=srun.tpi(config), model=model, overrides=words, run=run)


def array(
    job: Job, configs: Mapping[str, RunConfig], model: str, cells: Sequence[Configuration], needed: Sequence[Path]
) -> str:
    """Return the script of the configurations of a verify, each in a directory of its name.

    configs: by name. needed: the paths that they read; the first holds their directories.
    """
    steps = {name: ("srun", *srun.arguments(config, needed)) for name, config in configs.items()}
    tpi = srun.tpi(next(iter(configs.values())))
    return _render("array", job=job, srun=steps, tpi=tpi, model=model, cells=cells, directory=needed[0])


def judge(job: Job, config: RunConfig, directory: Path, needed: Sequence[Path]) -> str:
    """Return the script that judges the configurations when all have ended. needed: the paths that it reads."""
    step = [*config.cluster.srun_options, *srun.container(config, needed)]
    return _render("judge", job=job, step=step, tpi=srun.tpi(config), directory=directory)


def log_in(folder: Path, name: str) -> str:
    """sbatch's --output for a file in a folder. name: with SLURM's placeholders, such as "job-%j.log".

    Raises ConfigError: the path has a backslash, which makes SLURM keep its placeholders as they are.
    """
    if "\\" in str(folder):
        raise ConfigError(f"run.dir={folder}: SLURM cannot write a log where a name has a backslash in it")
    return f"{str(folder).replace('%', '%%')}/{name}"


def templates() -> Path:
    """Return the folder of the templates: beside the package in a checkout, inside it in an installed wheel."""
    inside = _PACKAGE / "slurm"
    return inside if inside.is_dir() else _PACKAGE.parent / "slurm"


def _render(template: str, **values: Any) -> str:
    environment = Environment(
        loader=FileSystemLoader(templates()),
        undefined=StrictUndefined,
        autoescape=False,  # the text is bash; every value passes through one of the filters
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "q": lambda value: shlex.quote(str(value)),
        "words": lambda values: shlex.join(map(str, values)),
        "s": _sbatch,
        "option": _option,
        "comment": single_line,
    }
    return environment.get_template(f"{template}.sbatch.j2").render(values | {"folder": Path.cwd()})


def _sbatch(value: object) -> str:
    """Return a value on an #SBATCH line, quoted for sbatch, whose rules differ from bash's. Raises ConfigError."""
    text = str(value)
    if not text.isprintable():
        raise ConfigError(f"{text!r} cannot be told to sbatch: it has a line break or another invisible character")
    if _PLAIN.fullmatch(text):
        return text
    escaped = re.sub(r'(["\\])', r"\\\1", text)
    return f'"{escaped}"'


def _option(text: str) -> str:
    """Return an option as typed: --name or --name=value."""
    name, is_, value = text.partition("=")
    return f"{_sbatch(name)}={_sbatch(value)}" if is_ else _sbatch(name)


@dataclass(frozen=True)
class JobScript:
    """One job. role: as in submission.json: "train", "configurations" or "judge"."""

    role: str
    file: Path
    text: str


@dataclass(frozen=True)
class PlannedSubmission:
    """A submission before it is made.

    about:    a few words about the nodes and ranks that it needs. allocated: the same as numbers.
    memory:   a line about the fullest rank of its largest run.
    cells:    of a verify, by name, in the order of the array's tasks; empty for a single run.
    scripts:  in the order of submission; the second waits for the end of the first.
    validate: lets Bridge validate the runs; what the user should know of them. Raises ConfigError.
    write:    writes the runs, before the scripts.
    after:    ids of the jobs that must have ended well before the first of these begins.
    unseen:   requirements of the nodes that this host cannot check, a line each.
    omitted: combinations of a sweep that no run can have.
    warnings: what may end a run early, although nothing refuses it.
    resumed:  whether the directory holds a run, with which the job goes on.
    completed: why there is nothing to submit: the run has all its steps; None: there is.
    """

    model: str
    about: str
    allocated: Allocation
    memory: str
    directory: RunDir
    scripts: tuple[JobScript, ...]
    cells: tuple[str, ...] = ()
    validate: Callable[[], str | None] = lambda: None
    write: Callable[[], None] = lambda: None
    after: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    omitted: tuple[Omission, ...] = ()
    warnings: tuple[str, ...] = ()
    resumed: bool = False
    completed: str | None = None

    def options(self, number: int, *ids: str) -> list[str]:
        """sbatch's options beside those of a script. ids: of the jobs before it.

        The second job starts when the first has ended, with or without success.
        """
        waits = f"afterany:{ids[0]}" if number else ":".join(("afterok", *self.after)) if self.after else None
        return ["--kill-on-invalid-dep=yes", f"--dependency={waits}"] if waits else []

    def commands(self) -> list[str]:
        """Return the command that submits each script, for people."""
        numbered = enumerate(self.scripts)
        return [
            shlex.join(["sbatch", "--parsable", *self.options(number, "JOB"), str(s.file)]) for number, s in numbered
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the JSON of a dry run; documented in slurm/README.md."""
        return {
            **self._common(),
            "resumed": self.resumed,
            "nodes": self.allocated.nodes,
            "ranks_per_node": self.allocated.ranks,
            "gpus_per_node": self.allocated.gpus,
            "memory": self.memory,
            "after": list(self.after),
            "cells": list(self.cells),
            "left_out": [asdict(combination) for combination in self.omitted],
            "unseen": list(self.unseen),
            "warnings": list(self.warnings),
            "jobs": [
                {"role": script.role, "file": str(script.file), "command": command, "script": script.text}
                for script, command in zip(self.scripts, self.commands(), strict=True)
            ],
        }

    def as_dict(self, ids: Sequence[str]) -> dict[str, Any]:
        """Return the contents of submission.json. ids: of the submitted jobs, in the order of the scripts."""
        return {
            **self._common(),
            "command": shlex.join(["tpi", *sys.argv[1:]]),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "jobs": [{"id": job, "role": script.role} for script, job in zip(self.scripts, ids, strict=True)],
            **({"cells": list(self.cells)} if self.cells else {}),
        }

    def _common(self) -> dict[str, Any]:
        kind, path = "verify" if self.cells else "train", str(self.directory.path)
        return {"schema": registry.SCHEMA, "kind": kind, "model": self.model, "directory": path}


def check(submission: PlannedSubmission) -> str | None:
    """Let Bridge validate the runs. Imports it, which takes seconds. Raises ConfigError.

    returns: what the user should know of the runs, or why Bridge cannot validate on this machine, which may lack a
             driver or library of the nodes. They will.
    """
    try:
        remark = submission.validate()
    except TpiError:
        raise
    except Exception as error:
        return f"the nodes will ask Megatron-Bridge, which fails here: {type(error).__name__}: {error}"
    return f"warning: {remark}" if remark else None


def execute(submission: PlannedSubmission) -> dict[str, Any]:
    """Write the directory and submit. Returns the contents of submission.json. Raises RunError.

    If SLURM refuses, the directory is removed, so that the corrected command can be repeated.
    """
    where = submission.directory
    new = not where.path.exists()
    ids: list[str] = []
    with locked(where) if submission.resumed else locked_empty(where):
        earlier = where.script.read_bytes() if submission.resumed and where.script.exists() else None
        try:
            submission.write()
            where.logs.mkdir(parents=True, exist_ok=True)  # SLURM does not create it, and a job without its log fails
            for script in submission.scripts:
                where.write_text(script.file, script.text)
            for number, script in enumerate(submission.scripts):
                ids.append(slurm_client.sbatch(script.file, submission.options(number, *ids)))
        except BaseException as error:
            try:
                slurm_client.cancel(ids)
            except RunError as other:
                raise RunError(
                    f"{error}\nand job {ids[0]}, submitted before it, could not be ended: {other}"
                ) from error
            if not submission.resumed:
                _remove(where.path, whole=new)
            elif earlier is not None:
                write_atomically(where.script, earlier)
            else:
                where.script.unlink(missing_ok=True)
            raise
        contents = submission.as_dict(ids)
        try:
            registry.remember(where.path, ids)
            where.write(where.submission, contents)
        except RunError as error:
            raise RunError(f"job {' and '.join(ids)} is submitted, but tpi jobs may not find it: {error}") from error
        return contents


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
