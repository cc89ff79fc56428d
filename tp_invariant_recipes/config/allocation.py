"""How many nodes a run takes, and what a job must say to get them: one row a rule."""

from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.config import layout

Tree = dict[str, Any]


@dataclass(frozen=True)
class Allocation:
    """The part of a cluster that a run takes.

    ranks: on every node. gpus: on every node; 0 on a CPU.
    """

    nodes: int
    ranks: int
    gpus: int


def of(tree: Tree) -> Allocation:
    """The allocation a composed tree needs. Whole nodes but for a run that fits one."""
    world, most = layout.of(tree).world, ranks_per_node(tree)
    ranks = min(world, most or world)
    return Allocation(-(-world // ranks), ranks, ranks if tree["device"]["kind"] == "gpu" else 0)


def ranks_per_node(tree: Tree) -> int | None:
    """The most ranks a node takes; None where the cluster does not say."""
    cluster = tree["cluster"]
    return cluster["ranks_per_node"] or cluster["gpus_per_node"]
