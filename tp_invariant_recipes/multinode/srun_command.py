"""srun's command line for a run: how many nodes and tasks, in which container, and the words that run `tpi` there."""

import sys
from collections.abc import Sequence
from pathlib import Path

from tp_invariant_recipes.config import allocation, elastic
from tp_invariant_recipes.config.sections import RunConfig

WAIT = 60  # seconds that srun gives the other nodes when one has ended


def arguments(config: RunConfig, needed: Sequence[Path] = ()) -> list[str]:
    """srun's options for a run: as many nodes as it takes, one task on each, in the cluster's container if any.

    needed: as for `container`.
    """
    taken = allocation.of(config)
    if elastic.span(config):  # all nodes that the job has got this time
        return ["--ntasks-per-node=1", f"--wait={WAIT}", *container(config, needed)]
    options = [f"--nodes={taken.nodes}", f"--ntasks={taken.nodes}", "--ntasks-per-node=1", f"--wait={WAIT}"]
    return [*options, *container(config, needed)]


def container(config: RunConfig, needed: Sequence[Path]) -> list[str]:
    """Options of pyxis, which gives srun containers; none where the cluster has no container.

    needed: paths to mount beside the cluster's mounts. Sources: pyxis's README, `srun --help` with it.
    """
    cluster = config.cluster
    if not cluster.container:
        return []
    mounts = [*cluster.mounts, *(f"{path}:{path}" for path in needed if cluster.shared_files)]
    lists = {"mounts": mounts, "env": cluster.forward}  # env: the image's own values would win otherwise
    options = [f"--container-{name}={','.join(values)}" for name, values in lists.items() if values]
    return [f"--container-image={cluster.container}", *options]


def tpi(config: RunConfig) -> list[str]:
    """The words that run `tpi` on a node."""
    return [config.cluster.python or sys.executable, "-m", "tp_invariant_recipes"]
