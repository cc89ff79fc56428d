"""Elastic jobs, `slurm.nodes=2-4`: the layout for each number of nodes.

tp, pp, cp and ep stay. dp is the largest up to the requested dp that the nodes take, that divides what it must, and
that has the same bits.
"""

import re
from typing import Any

from tp_invariant_recipes.check import layout as layout_rules
from tp_invariant_recipes.check.hosts.job import misfits
from tp_invariant_recipes.check.invariant import invariance
from tp_invariant_recipes.check.rule import broken_rules
from tp_invariant_recipes.config import resume_rules
from tp_invariant_recipes.config.overrides import Override, parse
from tp_invariant_recipes.errors import Problem, lines
from tp_invariant_recipes.ledger.layouts import words
from tp_invariant_recipes.settings import allocation
from tp_invariant_recipes.settings.run_config import RunConfig

_SPAN = re.compile(r"([1-9]\d{0,5})(?:-([1-9]\d{0,5}))?", re.ASCII)


def span(config: RunConfig) -> tuple[int, int] | None:
    """Return the fewest and the most nodes of an elastic job; None: its layout decides.

    ValueError: slurm.nodes is no range.
    """
    requested = config.slurm.nodes
    if requested is None:
        return None
    match = _SPAN.fullmatch(requested)
    if match is None:
        raise ValueError(f"slurm.nodes={requested}: give the fewest and the most nodes, as in slurm.nodes=2-4")
    fewest = int(match[1])
    return fewest, int(match[2] or fewest)


def with_dp(config: RunConfig, dp: int) -> RunConfig:
    """Get the configuration with another data-parallel degree; numerics stay as the requested degree decides them."""
    return config.with_fields("parallel", data_parallel_size=dp)


def data_parallel(config: RunConfig, nodes: int) -> int | None:
    """Return the dp on so many nodes; None: they are too few for any. config: as requested."""
    return next((dp for dp in range(config.parallel.data_parallel_size, 0, -1) if _fits(config, dp, nodes)), None)


def problems(config: RunConfig) -> list[Problem]:
    """Return what is wrong with slurm.nodes of a job of this run."""
    try:
        requested = span(config)
    except ValueError as error:
        return [Problem("", str(error))]
    if requested is None:
        return []
    (fewest, most), whole = requested, allocation.from_config(config)
    if most != whole.nodes or fewest > most:
        text = f"with this layout the run takes {whole}, so that is the most"
        return [Problem(f"slurm.nodes={config.slurm.nodes}", text)]
    if not config.cluster.shared_files:
        why = "a run continues on other nodes from a checkpoint"
        return [Problem("slurm.nodes", f"{why}, so cluster.shared_files must be true")]
    if data_parallel(config, fewest) is not None:
        return []
    enough = next(count for count in range(fewest, most + 1) if data_parallel(config, count) is not None)
    return [Problem(f"slurm.nodes={config.slurm.nodes}", _why(config, fewest), f"slurm.nodes={enough}-{most}")]


def kept(config: RunConfig) -> list[Override]:
    """Return what a job sets of its numerics, so that every number of nodes has the same."""
    return [parse(text) for text in resume_rules.kept(config.section("numerics"))]


def _why(config: RunConfig, nodes: int) -> str:
    """Why the fewest nodes are too few."""
    smaller = [dp for dp in range(config.parallel.data_parallel_size, 0, -1) if _has_room(with_dp(config, dp), nodes)]
    if not smaller:
        return f"{words(with_dp(config, 1).layout.as_dict())} does not fit {nodes} of the nodes"
    return next(iter(_wrong(config, smaller[0])))


def _fits(config: RunConfig, dp: int, nodes: int) -> bool:
    return _has_room(with_dp(config, dp), nodes) and not _wrong(config, dp)


def _has_room(config: RunConfig, nodes: int) -> bool:
    return allocation.from_config(config).nodes <= nodes and not misfits(config)


def _wrong(config: RunConfig, dp: int) -> list[str]:
    other = with_dp(config, dp)
    bits = resume_rules.other_gradients(_run(config), _run(other))
    return lines([*bits, *broken_rules(other, (*layout_rules.RULES, *invariance.RULES))])


def _run(config: RunConfig) -> dict[str, Any]:
    return {"numerics": config.section("numerics"), "layout": config.layout.as_dict()}
