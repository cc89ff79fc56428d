# SPDX-License-Identifier: Apache-2.0
"""srun's command line for a run: how many nodes and tasks, in which container, and how to run `tpi` there."""

import sys
from collections.abc import Sequence
from pathlib import Path

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
