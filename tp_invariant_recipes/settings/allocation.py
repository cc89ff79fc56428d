"""The nodes of a cluster that a run takes."""

from dataclasses import dataclass

from tp_invariant_recipes.plural import counted
from tp_invariant_recipes.settings.run_config import RunConfig


@dataclass(frozen=True)
class Allocation:
    """The part of a cluster that a run takes.

    ranks: on every node. gpus: on every node; 0 on a CPU.
    """

    nodes: int
    ranks: int
    gpus: int

    def __str__(self) -> str:
        """2 nodes with 8 gpu ranks each; 1 node with 1 cpu rank."""
        ranks = counted(self.ranks, f"{'gpu' if self.gpus else 'cpu'} rank")
        return f"{self.nodes} nodes with {ranks} each" if self.nodes > 1 else f"1 node with {ranks}"


def from_config(config: RunConfig) -> Allocation:
    """Return the allocation a run needs. Whole nodes but for a run that fits one."""
    world, most = config.layout.world, ranks_per_node(config)
    ranks = min(world, most or world)
    return Allocation(-(-world // ranks), ranks, ranks if config.device.kind == "gpu" else 0)


def ranks_per_node(config: RunConfig) -> int | None:
    """Return the most ranks a node takes; None where the cluster does not say."""
    cluster = config.cluster
    return cluster.ranks_per_node or cluster.gpus_per_node
