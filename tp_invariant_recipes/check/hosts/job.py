# SPDX-License-Identifier: Apache-2.0
"""What a job must say to get its nodes, and what its nodes must have: one row a rule."""

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tp_invariant_recipes.check.rule import Rule, broken_rules, value_of
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings import run_config
from tp_invariant_recipes.settings.environment import NAME
from tp_invariant_recipes.settings.run_config import RunConfig

LONG = 3600  # seconds of a job that saves no checkpoint, before tpi warns


@dataclass(frozen=True)
class PendingJob:
    """A job that is about to be submitted.

    environ: of the process that submits. dry: for another host, whose files this one may not have.
    """

    config: RunConfig
    environ: Mapping[str, str]
    dry: bool = False


def check_job(job: PendingJob) -> list[Problem]:
    """Everything that keeps a job from being submitted here, each with the key to change."""
    return [*misfits(job.config), *broken_rules(job, SUBMITTED)]


def warnings(config: RunConfig) -> list[Problem]:
    """Return what may cost a job its work, although it can be submitted. `check_job` has refused none."""
    if config.section("checkpoint")["save_interval"]:
        return []
    if parse_time(config.slurm.time or "0") <= LONG:
        return []
    text = f"a run of slurm.time={config.slurm.time} saves only before SLURM stops it"
    return [Problem("save=0", f"{text}, so a node that fails costs all steps", "save=N saves every N steps")]


def unseen(config: RunConfig) -> list[Problem]:
    """Paths that the nodes need and that this host lacks, each with its key."""
    return [Problem(where, f"{path} is not on this host", "the nodes must have it") for where, path in _needed(config)]


def _needed(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the image, and the sources of mounts, that are missing here: the key and its value, and the path."""
    cluster = config.cluster
    image = cluster.container
    if image and image.startswith("/") and not os.path.exists(image):
        yield f"cluster.container={image}", image
    for mount in cluster.mounts:
        match = _MOUNT.fullmatch(mount)
        if match and not os.path.exists(match["source"]):
            yield f"cluster.mounts: {mount}", match["source"]


def _absent(job: PendingJob) -> Iterator[Problem]:
    """Paths that are missing in a folder that this host has. Whole folders may be the nodes' own."""
    for where, path in _needed(job.config):
        folder = os.path.dirname(path.rstrip("/"))
        if folder != "/" and os.path.isdir(folder):
            yield Problem(where, f"{path} does not exist, and this host has {folder}")


def misfits(config: RunConfig) -> list[Problem]:
    """Get what of `check_job` holds wherever it is asked, so also on a node, in a container, without `tpi submit`."""
    return broken_rules(config, FITTING)


def parse_time(text: str) -> int:
    """Seconds of a time limit as sbatch takes it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. ValueError: it is none."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is no time limit: minutes, or as in 30:00, 4:00:00, 2-12 or 2-12:00:00")
    days, first, *rest = (int(part) for part in match.groups(default="0"))
    # Without days the first of three is hours, the first of one or two is minutes.
    if match["days"] is None and match["third"] is None:
        return first * 60 + rest[0]
    return days * 86400 + first * 3600 + rest[0] * 60 + rest[1]


_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+)(?::(?P<third>\d+))?)?", re.ASCII)


def _more_ranks_than_gpus(config: RunConfig) -> Iterator[Problem]:
    ranks, gpus = config.cluster.ranks_per_node, config.cluster.gpus_per_node
    if config.device.kind == "gpu" and ranks and gpus and ranks > gpus:
        more = f"cluster.ranks_per_node={ranks} is more than cluster.gpus_per_node={gpus}"
        yield Problem("", f"{more}, and each rank takes a GPU")


def _part_of_a_node(config: RunConfig) -> Iterator[Problem]:
    at, most = config.layout, run_config.ranks_per_node(config)
    if most is None or most < 1 or _fills(at.world, most):
        return
    shard = at.world // at.dp
    lower = next((dp for dp in range(at.dp - 1, 0, -1) if _fills(shard * dp, most)), None)
    higher = next(dp for dp in range(at.dp + 1, at.dp + most + 1) if _fills(shard * dp, most))
    nearest = " or ".join(f"dp={dp} ({shard * dp} ranks)" for dp in (lower, higher) if dp)
    text = f"tp={at.tp} * pp={at.pp} * cp={at.cp} * dp={at.dp} = {at.world} ranks do not fill nodes of {most}"
    yield Problem("", text, f"the nearest that do: {nearest}; or other nodes: cluster.ranks_per_node=N")


def _fills(world: int, most: int) -> bool:
    return world <= most or world % most == 0


def _srun_options(config: RunConfig) -> Iterator[Problem]:
    yield from _unfit_options("cluster.srun_options", config.cluster.srun_options, "step", STEPPED)
    if config.cluster.container_runtime == "apptainer":
        for option in config.cluster.srun_options:
            if option.startswith("--container"):
                yield Problem("cluster.srun_options", f"{option} is of pyxis, and cluster.container_runtime=apptainer")


def _unfit_options(key: str, options: Sequence[str], what: str, allocated: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what is wrong with options as typed.

    allocated: those that the job or step has itself -> what to set instead.
    """
    for option in options:
        name = re.split(r"[=\s]", option, maxsplit=1)[0]
        if not _LONG_OPTION.fullmatch(name):
            yield Problem(key, f"{option!r} does not begin with an option's long name, such as --reservation=NAME")
        elif not option.isprintable():
            yield Problem(key, f"{option!r} does not fit one line")
        # SLURM takes any beginning of a name that fits no other.
        elif own := next((t for t in (name, *allocated) if t in allocated and t.startswith(name)), None):
            yield Problem(key, f"{option}: the {what} says {own} itself", allocated[own])


def _no_gpu_memory(config: RunConfig) -> bool:
    return config.cluster.gpu_memory is not None and config.cluster.gpu_memory < 1


FITTING: tuple[Rule[RunConfig], ...] = (
    Rule(_no_gpu_memory, "must be at least 1", head=value_of("cluster.gpu_memory")),
    *map(Rule[RunConfig], (_more_ranks_than_gpus, _part_of_a_node, _srun_options)),
)  # fmt: skip


def _unknown_nodes(config: RunConfig) -> Iterator[Problem]:
    if run_config.ranks_per_node(config) is None:
        clusters = "cluster=h100 (or h200, b300, gb300, gh200), cluster=FILE.yaml, or cluster.ranks_per_node=N"
        yield Problem("", f"cluster={config.cluster.name} does not say how many ranks a node takes: {clusters}")


def _other_device(config: RunConfig) -> Iterator[Problem]:
    name, device, gpus = config.cluster.name, config.device.kind, config.cluster.gpus_per_node
    if device == "cpu" and gpus:
        yield Problem("", f"cluster={name} is of GPU nodes and device=cpu")
    if device == "gpu" and gpus == 0:
        text = f"cluster={name} has cluster.gpus_per_node=0 and device=gpu"
        yield Problem("", text, "device=cpu runs the toy models")


def _time(config: RunConfig) -> Iterator[Problem]:
    time, before = config.slurm.time, config.slurm.save_before
    if time is None:
        yield Problem("", "slurm.time is not set; give the time limit of one start, as in slurm.time=4:00:00")
        return
    try:
        seconds = parse_time(time)
    except ValueError as error:
        yield Problem(f"slurm.time={time}", str(error))
    else:
        if seconds <= before:
            yield Problem("", f"slurm.time={time} is {seconds} seconds, no longer than slurm.save_before={before}")


def _words(config: RunConfig) -> Iterator[Problem]:
    for key in ("slurm.account", "slurm.partition", "slurm.qos", "cluster.gpu_type"):
        value = config.at(key)
        if value is not None and not _WORD.fullmatch(value):
            yield Problem(f"{key}={value!r}", "must be a word, without spaces and what a shell would read")


def _options(config: RunConfig) -> Iterator[Problem]:
    yield from _unfit_options("slurm.options", config.slurm.options, "job", WRITTEN)


def _container(config: RunConfig) -> Iterator[Problem]:
    cluster = config.cluster
    image, apptainer = cluster.container, cluster.container_runtime == "apptainer"
    key = f"cluster.container={image}"
    if image is None:
        if cluster.mounts:
            there = "cluster.mounts is set and there is no container"
            yield Problem("", f"{there}: cluster.container=IMAGE, or leave mounts out")
        return
    if cluster.python is None:
        yield Problem(key, "which interpreter inside runs tpi? as in cluster.python=python3")
    if not image.isprintable() or image.startswith("-"):
        yield Problem("", f"cluster.container={image!r} is no image")
    elif apptainer and not (image.startswith("/") or _URI.match(image)):
        yield Problem(key, f"Apptainer takes an absolute path, or a URI such as docker://{image}")
    elif not apptainer and image.endswith(".sqsh") and not image.startswith("/"):
        yield Problem(key, "must be an absolute path, or pyxis looks for an image of this name")
    elif not apptainer and image.endswith(".sif"):
        yield Problem("", f"{key} is an image for Apptainer: cluster.container_runtime=apptainer")


def _mounts(config: RunConfig) -> Iterator[Problem]:
    for mount in config.cluster.mounts:
        if _MOUNT.fullmatch(mount) is None:
            form = "SOURCE:TARGET or SOURCE:TARGET:FLAGS with absolute paths"
            yield Problem("cluster.mounts", f"{mount!r} is not {form}")


def _setup(config: RunConfig) -> Iterator[Problem]:
    for line in config.slurm.setup:
        if not line.strip() or not line.isprintable():
            yield Problem("slurm.setup", f"{line!r} is not one line of bash")


def _python(config: RunConfig) -> Iterator[Problem]:
    python = config.cluster.python
    if python is not None and "/" in python and not python.startswith("/"):
        text = "must be an absolute path, or a name on the nodes' PATH such as python3"
        yield Problem(f"cluster.python={python}", text)


def _other_processors(config: RunConfig) -> Iterator[Problem]:
    """Yield why this environment does not run on the nodes. tpi does not look into images and other environments."""
    cluster = config.cluster
    if cluster.container is None and cluster.python is None and cluster.architecture not in (None, platform.machine()):
        nodes = f"the nodes of cluster={cluster.name} are {cluster.architecture} (cluster.architecture)"
        text = f"this environment ({sys.prefix}) is for {platform.machine()}, and {nodes}"
        made = "an environment that `make bootstrap` made on a node"
        yield Problem("", text, f"cluster.container=IMAGE, or cluster.python=PATH of {made}")


def _forwarded(job: PendingJob) -> Iterator[Problem]:
    for name in job.config.cluster.forward:
        if not NAME.fullmatch(name):
            solve = "name it only, and set it where you submit"
            yield Problem("cluster.forward", f"{name!r} is no name of a variable", solve)
        elif name not in job.environ:
            yield Problem("cluster.forward", f"{name} is not set here", "export it, or leave it out of cluster.forward")


_rule = partial(Rule, of=lambda job: (job.config,))

SUBMITTED: tuple[Rule[PendingJob], ...] = (
    *map(_rule, (_unknown_nodes, _other_device, _time, _words, _options, _container, _mounts)),
    Rule(_absent, needs=lambda job: not job.dry),
    *map(_rule, (_setup, _python, _other_processors)),
    Rule(_forwarded),
)

_URI = re.compile(r"[a-z]+://[^\s/]", re.ASCII)
_WORD = re.compile(r"[\w.,@+:/-]+", re.ASCII)
_LONG_OPTION = re.compile(r"--[a-z][a-z0-9-]+", re.ASCII)
_MOUNT = re.compile(r"(?P<source>/[^:,\s]*):(?P<target>/[^:,\s]*)(:[\w+=-]+)?", re.ASCII)

_WHERE_LOGS_LIE = "what it prints is in logs/ of run.dir"
_HOW_MANY = "how many is decided by the layout (tp, pp, cp, dp) and cluster.ranks_per_node"
_WHICH_GPUS = "cluster.gpus_per_node and cluster.gpu_type"
_WHAT_RANKS_SEE = "cluster.environment and cluster.forward"

# Options that both the job's script and its step have or that would undo what they rely on -> what to set instead.
_BOTH = {
    **dict.fromkeys(("--nodes", "--ntasks", "--ntasks-per-node"), _HOW_MANY),
    **dict.fromkeys(("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task"), _WHICH_GPUS),
    **dict.fromkeys(("--output", "--error"), _WHERE_LOGS_LIE),
    **dict.fromkeys(("--export", "--export-file"), _WHAT_RANKS_SEE),
    "--chdir": "relative paths are those of the folder in which you submit",
    "--container-image": "cluster.container",
    "--container-mounts": "cluster.mounts",
    "--time": "slurm.time",
}

# The others of sbatch.
WRITTEN = _BOTH | {
    "--account": "slurm.account",
    "--partition": "slurm.partition",
    "--qos": "slurm.qos",
    "--time-min": "slurm.time",
    "--signal": "slurm.save_before",
    "--exclusive": "slurm.exclusive=true",
    "--requeue": "slurm.tries",
    "--no-requeue": "slurm.tries=1",
    "--job-name": "it is the last part of run.dir",
    "--open-mode": _WHERE_LOGS_LIE,
    "--array": "tpi submit --verify makes arrays",
    "--dependency": "tpi submit --after JOB waits for a job",
    "--kill-on-invalid-dep": "tpi submit --after JOB waits for a job",
    "--parsable": "tpi submit prints the job's id alone",
    "--wrap": "the script is tpi's",
}

# The others of srun.
STEPPED = _BOTH | {
    **dict.fromkeys(("--wait", "--kill-on-bad-exit", "--no-kill"), "srun ends a step when one of its nodes has ended"),
    **dict.fromkeys(("--gpu-bind", "--cpu-bind"), "all ranks of a node share its one task"),
    "--multi-prog": "one program runs on all nodes",
    "--input": "tpi reads no standard input",
    "--container-env": "cluster.forward",
    "--container": "cluster.container",
    "--bcast": "cluster.python",
    "--jobid": "the step belongs to its job",
}
