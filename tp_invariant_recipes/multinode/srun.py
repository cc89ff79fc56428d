# SPDX-License-Identifier: Apache-2.0
"""srun's command line for a run: how many nodes and tasks, in which container; and a run inside an allocation."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from tp_invariant_recipes.check.hosts.job import misfits
from tp_invariant_recipes.config.overrides import cluster_files, parse
from tp_invariant_recipes.errors import ConfigError, RunError, lines, refuse
from tp_invariant_recipes.launch.plan import for_nodes
from tp_invariant_recipes.launch.record import RunRequest
from tp_invariant_recipes.runs.lock import locked
from tp_invariant_recipes.runs.run_dir import RunDir, choose
from tp_invariant_recipes.settings import run_config
from tp_invariant_recipes.settings.run_config import RunConfig

WAIT = 60  # seconds that srun gives the other nodes when one has ended


def arguments(config: RunConfig, needed: Sequence[Path] = ()) -> list[str]:
    """srun's arguments before `tpi`: nodes, one task on each, the cluster's container with paths `needed` there."""
    nodes = run_config.allocation_of(config).nodes
    options = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--wait={WAIT}"]
    return [*options, *config.cluster.srun_options, *container(config, needed)]


def container(config: RunConfig, needed: Sequence[Path]) -> list[str]:
    """Return the words that put a step into the cluster's container, if any. needed: paths to mount beside its mounts.

    Sources: pyxis's README, `srun --help` with it; Apptainer's `apptainer exec --help` and its pages on bind paths and
    GPU support. Apptainer hands the host's environment on.
    """
    cluster = config.cluster
    if not cluster.container:
        return []
    file = Path((config.recipe.name or "").rpartition(":")[0])
    folders = [file.parent] if file.is_absolute() else []
    paths = [*needed, *(folders + ([Path(config.recipe.hf_folder)] if config.recipe.hf_folder else []))]
    mounts = [*cluster.mounts, *(f"{path}:{path}" for path in paths)]
    if cluster.container_runtime == "apptainer":
        gpus = ["--nv"] if config.device.kind == "gpu" else []
        binds = [f"--bind={mount}" for mount in mounts]
        return ["apptainer", "exec", *gpus, *binds, cluster.container]
    lists = {"mounts": mounts, "env": cluster.forward}  # env: the image's own values would win otherwise
    options = [f"--container-{name}={','.join(values)}" for name, values in lists.items() if values]
    return [f"--container-image={cluster.container}", *options]


def tpi(config: RunConfig) -> list[str]:
    """Return the words that run `tpi` on a node."""
    return [config.cluster.python or sys.executable, "-m", "tp_invariant_recipes"]


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
    os.environ["SLURM_CPU_BIND"] = "none"  # srun would bind the one task of a node, with all its ranks, to one core
    needed = [path, *cluster_files(request.overrides)]
    os.execvp("srun", ["srun", *arguments(config, needed), *tpi(config), "train", *request.words()])
