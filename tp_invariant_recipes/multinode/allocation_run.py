"""A run inside an allocation that is there: become srun, with one task a node, and what each task is asked for."""

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from tp_invariant_recipes.config import allocation, environment, layout
from tp_invariant_recipes.config.compose import Composed
from tp_invariant_recipes.config.overrides import cluster_files, parse
from tp_invariant_recipes.config.sections import RunConfig
from tp_invariant_recipes.errors import ConfigError, RunError, listed
from tp_invariant_recipes.launch.plan import Plan, Request, for_nodes
from tp_invariant_recipes.multinode import srun_command
from tp_invariant_recipes.multinode.agent import NodeTask
from tp_invariant_recipes.runs.lock import locked
from tp_invariant_recipes.runs.run_dir import RunDir, choose

# srun would bind the one task of a node, and with it all its ranks, to one core.
UNBOUND = {"SLURM_CPU_BIND": "none"}


def become(request: Request) -> NoReturn:
    """Replace this process by srun, which starts the same command on every node. Raises a TpiError."""
    if "SLURM_JOB_ID" not in os.environ:
        raise ConfigError("launcher=slurm needs an allocation of SLURM: salloc, or tpi submit, which makes a job")
    if shutil.which("srun") is None:
        raise RunError("launcher=slurm: srun is not on PATH here, though this is an allocation of SLURM")
    composed = for_nodes(request.composed, lambda composed: composed.config, request.overrides)
    if request.resume is None:  # said outright, for the nodes too
        device = composed.config.device.kind
        request = replace(request, overrides=(parse(f"device={device}"), *request.overrides))
    config = _fitting(composed)
    given = int(os.environ["SLURM_JOB_NUM_NODES"])
    if (taken := allocation.of(config)).nodes > given:
        raise ConfigError(
            f"this run takes {taken}, and the allocation has {given}: "
            f"salloc --nodes={taken.nodes}, or change the layout or cluster.ranks_per_node"
        )
    if request.resume is None:
        asked = config.run.dir
        found = (
            Path(asked) if asked and request.go_on else choose(asked, f"{request.model}-tp{layout.of(config).tp}").path
        )
        path = found.expanduser().absolute()
        request = replace(request, overrides=(*request.overrides, parse(f"run.dir={path}")))
    else:
        path = request.resume.absolute()
    with locked(RunDir(path)):  # before srun starts; it makes the directory: a container can show only what is there
        pass
    os.environ |= UNBOUND
    needed = [path, *cluster_files(request.overrides)]
    os.execvp(
        "srun", ["srun", *srun_command.arguments(config, needed), *srun_command.tpi(config), "train", *request.words()]
    )


def node_task(
    request: Request,
    watch: Callable[[Plan], AbstractContextManager[Callable[[], None]]],
    remark: Callable[[str], None],
) -> NodeTask:
    """What the task of each node is asked for. watch, remark: as in NodeTask. Raises ConfigError."""
    composed = request.composed()
    config = _fitting(composed)
    where = request.resume or config.run.dir
    if where is None:
        raise ConfigError("launcher=slurm: each node would choose a run directory of its own; set run.dir=PATH")
    return NodeTask(
        run_dir=RunDir(Path(where).expanduser()),
        environment=environment.settings(config.device.kind, os.environ, config.cluster.environment),
        lead=partial(request.plan, composed),
        follow=partial(request.follow, composed),
        rendezvous_timeout=config.slurm.rendezvous_timeout,
        tries=config.slurm.tries,
        watch=watch,
        remark=remark,
    )


def _fitting(composed: Composed) -> RunConfig:
    """What is composed. Raises ConfigError when the cluster's nodes cannot carry it."""
    problems = allocation.misfits(composed.config)
    if problems:
        raise ConfigError(listed(problems), problems)
    return composed.config
