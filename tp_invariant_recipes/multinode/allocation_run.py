# SPDX-License-Identifier: Apache-2.0
"""A run inside an existing allocation: start one task a node with srun, and build what each task runs."""

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from tp_invariant_recipes.check.hosts.job import misfits
from tp_invariant_recipes.config.overrides import cluster_files, parse
from tp_invariant_recipes.errors import ConfigError, RunError, lines, refuse
from tp_invariant_recipes.launch.plan import Plan, for_nodes
from tp_invariant_recipes.launch.record import RunRequest
from tp_invariant_recipes.multinode import srun_command
from tp_invariant_recipes.multinode.agent import NodeTask
from tp_invariant_recipes.runs.lock import locked
from tp_invariant_recipes.runs.run_dir import RunDir, choose
from tp_invariant_recipes.settings import run_config

# srun would bind the one task of a node, and with it all its ranks, to one core.
UNBOUND = {"SLURM_CPU_BIND": "none"}


def exec_srun(request: RunRequest) -> NoReturn:
    """Replace this process by srun, which starts the same command on every node. Raises a TpiError."""
    if "SLURM_JOB_ID" not in os.environ:
        raise ConfigError("launcher=slurm needs an allocation of SLURM: salloc, or tpi submit, which makes a job")
    if shutil.which("srun") is None:
        raise RunError("launcher=slurm: srun is not on PATH here, though this is an allocation of SLURM")
    composed = for_nodes(request.composed, lambda composed: composed.config, request.overrides)
    if request.resume is None:  # explicit, so that every node uses it
        device = composed.config.device.kind
        request = replace(request, overrides=(parse(f"device={device}"), *request.overrides))
    config = composed.config
    refuse(lines(misfits(config)))
    given = int(os.environ["SLURM_JOB_NUM_NODES"])
    if (allocated := run_config.allocation_of(config)).nodes > given:
        raise ConfigError(
            f"this run takes {allocated}, and the allocation has {given}: "
            f"salloc --nodes={allocated.nodes}, or change the layout or cluster.ranks_per_node"
        )
    if request.resume is None:
        requested = config.run.dir
        directory = (
            Path(requested)
            if requested and request.continues
            else choose(requested, f"{request.model}-tp{config.layout.tp}").path
        )
        path = directory.expanduser().absolute()
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
    request: RunRequest,
    watch: Callable[[Plan], AbstractContextManager[Callable[[], None]]],
    remark: Callable[[str], None],
) -> NodeTask:
    """Return the task of each node. watch, remark: as in NodeTask. Raises ConfigError."""
    composed = request.composed()
    refuse(lines(misfits(composed.config)))
    where = request.resume or composed.config.run.dir
    if where is None:
        raise ConfigError("launcher=slurm: each node would choose a run directory of its own; set run.dir=PATH")
    return NodeTask(request, composed, RunDir(Path(where).expanduser()), watch, remark)
