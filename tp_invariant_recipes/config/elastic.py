"""Jobs that take as many nodes as there are, `slurm.nodes=2-4`, and the layout that they have on each number of nodes.

tp, pp, cp and ep stay. dp is the largest up to the one asked for that the nodes take, that divides what it must, and
that has the bits of the one asked for.
"""

import re
from typing import Any

from tp_invariant_recipes.config import going_on, job_rules
from tp_invariant_recipes.config.overrides import Override, parse
from tp_invariant_recipes.coverage import invariance
from tp_invariant_recipes.ledger.layouts import words
from tp_invariant_recipes.settings import allocation, layout
from tp_invariant_recipes.settings.run_config import RunConfig, Tree, typed

_SPAN = re.compile(r"([1-9]\d{0,5})(?:-([1-9]\d{0,5}))?", re.ASCII)


def span(config: RunConfig) -> tuple[int, int] | None:
    """The fewest and the most nodes of a job that takes what there is; None: its layout decides.

    ValueError: slurm.nodes is no range.
    """
    asked = config.slurm.nodes
    if asked is None:
        return None
    match = _SPAN.fullmatch(asked)
    if match is None:
        raise ValueError(f"slurm.nodes={asked}: give the fewest and the most nodes, as in slurm.nodes=2-4")
    fewest = int(match[1])
    return fewest, int(match[2] or fewest)


def with_dp(tree: Tree, dp: int) -> Tree:
    """The tree with another data-parallel degree, and what the one asked for decides of the numerics."""
    return {**tree, "parallel": tree["parallel"] | {"data_parallel_size": dp}}


def data_parallel(tree: Tree, nodes: int) -> int | None:
    """The dp on so many nodes; None: they are too few for any. tree: as asked for."""
    asked = typed(tree).parallel.data_parallel_size
    return next((dp for dp in range(asked, 0, -1) if _fits(tree, dp, nodes)), None)


def problems(tree: Tree) -> list[str]:
    """Everything that is wrong with slurm.nodes of a job of this tree."""
    config = typed(tree)
    try:
        asked = span(config)
    except ValueError as error:
        return [str(error)]
    if asked is None:
        return []
    (fewest, most), whole = asked, allocation.of(config)
    if most != whole.nodes or fewest > most:
        return [f"slurm.nodes={config.slurm.nodes}: with this layout the run takes {whole}, so that is the most"]
    if not config.cluster.shared_files:
        return ["slurm.nodes: a run goes on with other nodes from a checkpoint, so cluster.shared_files must be true"]
    if data_parallel(tree, fewest) is not None:
        return []
    enough = next(count for count in range(fewest, most + 1) if data_parallel(tree, count) is not None)
    return [f"slurm.nodes={config.slurm.nodes}: {_why(tree, fewest)}; slurm.nodes={enough}-{most}"]


def kept(tree: Tree) -> list[Override]:
    """What a job sets of its numerics, so that every number of nodes has the same."""
    return [parse(text) for text in going_on.kept(tree["numerics"])]


def _why(tree: Tree, nodes: int) -> str:
    """Why the fewest nodes are too few."""
    smaller = [dp for dp in range(typed(tree).parallel.data_parallel_size, 0, -1) if _room(with_dp(tree, dp), nodes)]
    if not smaller:
        return f"{words(layout.of(typed(with_dp(tree, 1))).as_dict())} does not fit {nodes} of the nodes"
    return next(iter(_wrong(tree, smaller[0])))


def _fits(tree: Tree, dp: int, nodes: int) -> bool:
    return _room(with_dp(tree, dp), nodes) and not _wrong(tree, dp)


def _room(tree: Tree, nodes: int) -> bool:
    config = typed(tree)
    return allocation.of(config).nodes <= nodes and not job_rules.misfits(config)


def _wrong(tree: Tree, dp: int) -> list[str]:
    other = with_dp(tree, dp)
    bits = going_on.other_gradients(_run(tree), _run(other))
    return [*([bits] if bits else []), *layout.problems(other), *invariance.problems(other)]


def _run(tree: Tree) -> dict[str, Any]:
    return {"numerics": tree["numerics"], "layout": layout.of(typed(tree)).as_dict()}
