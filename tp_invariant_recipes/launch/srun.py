"""A run on the nodes of an allocation that is there: srun, with one task a node, and what each task is asked for."""

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NoReturn

from tp_invariant_recipes.config import allocation, environment, layout
from tp_invariant_recipes.config.compose import listed
from tp_invariant_recipes.errors import ConfigError, RunError
from tp_invariant_recipes.launch.node import Asked
from tp_invariant_recipes.launch.plan import Plan, Request, device_on
from tp_invariant_recipes.training.rundir import choose

WAIT = 60  # seconds that srun gives the other nodes when one has ended


def arguments(tree: dict[str, Any]) -> list[str]:
    """srun's options for a run: as many nodes as it takes, one task on each, in the cluster's container if any."""
    taken, cluster = allocation.of(tree), tree["cluster"]
    options = [f"--nodes={taken.nodes}", f"--ntasks={taken.nodes}", "--ntasks-per-node=1", f"--wait={WAIT}"]
    if cluster["container"]:
        options += [f"--container-image={cluster['container']}", f"--container-mounts={','.join(cluster['mounts'])}"]
    return options


def tpi(tree: dict[str, Any]) -> list[str]:
    """The words that run `tpi` on a node."""
    return [tree["cluster"]["python"] or sys.executable, "-m", "tp_invariant_recipes"]


def become(request: Request) -> NoReturn:
    """Replace this process by srun, which starts the same command on every node. Raises a TpiError."""
    if "SLURM_JOB_ID" not in os.environ:
        raise ConfigError("launcher=slurm needs an allocation of SLURM: salloc, or tpi submit, which makes a job")
    if shutil.which("srun") is None:
        raise RunError("launcher=slurm: srun is not on PATH here, though this is an allocation of SLURM")
    if request.model is not None:
        request = replace(
            request, overrides=(f"device={device_on(request.model, request.overrides)}", *request.overrides)
        )
    tree = _fitting(request)
    given = int(os.environ["SLURM_JOB_NUM_NODES"])
    if (taken := allocation.of(tree)).nodes > given:
        raise ConfigError(
            f"this run takes {taken.nodes} nodes with {taken.ranks} ranks on each, and the allocation has {given}: "
            f"salloc --nodes={taken.nodes}, or change the layout or cluster.ranks_per_node"
        )
    if request.resume is None and tree["run"]["dir"] is None:
        path = choose(None, f"{request.model}-tp{layout.of(tree).tp}").path.absolute()
        request = replace(request, overrides=(*request.overrides, f"run.dir={path}"))
    os.execvp("srun", ["srun", *arguments(tree), *tpi(tree), "train", *request.words()])


def asked(request: Request, watch: Callable[[Plan], AbstractContextManager[Callable[[], None]]]) -> Asked:
    """What the task of each node is asked for. Raises ConfigError."""
    tree = _fitting(request)
    if request.resume is None and tree["run"]["dir"] is None:
        raise ConfigError("launcher=slurm: each node would choose a run directory of its own; set run.dir=PATH")
    return Asked(
        environment=environment.settings(tree["device"]["kind"], os.environ, tree["cluster"]["environment"]),
        lead=request.plan,
        follow=request.follow,
        meet=tree["slurm"]["meet"],
        tries=tree["slurm"]["tries"],
        watch=watch,
    )


def _fitting(request: Request) -> dict[str, Any]:
    """The composed tree. Raises ConfigError when the cluster's nodes cannot carry it."""
    tree = request.composed().tree
    problems = allocation.misfits(tree)
    if problems:
        raise ConfigError(listed(problems), problems)
    return tree
