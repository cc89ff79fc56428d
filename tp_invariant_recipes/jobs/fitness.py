"""Checks that the cluster's nodes and partitions accept the jobs of some runs, and lists every problem."""

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta

from tp_invariant_recipes.config import job_rules
from tp_invariant_recipes.errors import RunError, refuse
from tp_invariant_recipes.jobs import slurm_client
from tp_invariant_recipes.jobs.slurm_client import Partition
from tp_invariant_recipes.launch import memory
from tp_invariant_recipes.settings import allocation
from tp_invariant_recipes.settings.nearest import nearest
from tp_invariant_recipes.settings.run_config import RunConfig


def check(configs: Sequence[RunConfig], problems: list[str], *, dry: bool) -> None:
    """Raises ConfigError that lists `problems` and the problems of a job of these runs.

    dry: do not query SLURM.
    """
    wrong = dict.fromkeys(
        problem
        for config in configs
        for problem in (*job_rules.problems(config, os.environ, dry=dry), *memory.problems(config, here=False))
    )
    problems = [*problems, *wrong]
    if not dry:
        try:
            there = slurm_client.partitions()
        except RunError as error:
            problems.append(str(error))
        else:
            problems += dict.fromkeys(problem for config in configs for problem in unfit(config, there))
    refuse(problems)


def warnings(configs: Mapping[str, RunConfig]) -> tuple[str, ...]:
    """What may end these runs early, although nothing refuses them. configs: by label; "" of a single run."""
    tight = {label: memory.warning(config, here=False) for label, config in configs.items()}
    lines = [f"{label}: {line}" if label else line for label, line in tight.items() if line]
    return (*lines, *dict.fromkeys(line for config in configs.values() for line in job_rules.warnings(config)))


def unfit(config: RunConfig, there: Sequence[Partition]) -> list[str]:
    """The reasons why a job of this tree would wait forever in its partitions, although SLURM accepts it."""
    requested = config.slurm.partition or os.environ.get("SBATCH_PARTITION")
    names = requested.split(",") if requested else [p.name for p in there if p.default]
    known = {partition.name: partition for partition in there}
    listing = ", ".join(f"{p.name}{' (default)' if p.default else ''}" for p in there)
    if not names:
        return [f"this cluster has no default partition; set slurm.partition to one of: {listing}"]
    problems = [
        f"slurm.partition={requested}: there is no {name}{nearest(name, known)}; there are: {listing}"
        for name in names
        if name not in known
    ]
    if not problems:
        chosen = [known[name] for name in names]
        problems = [problem for rule in (_too_long, _too_many) if (problem := rule(config, chosen, ",".join(names)))]
    return problems


def _too_long(config: RunConfig, chosen: Sequence[Partition], names: str) -> str | None:
    limits = [partition.seconds for partition in chosen]
    longest = None if None in limits else max(seconds for seconds in limits if seconds is not None)
    try:
        requested = job_rules.parse_time(config.slurm.time or "")
    except ValueError:  # job_rules reports it
        return None
    if longest is None or requested <= longest:
        return None
    return f"slurm.time={config.slurm.time}: partition {names} allows {timedelta(seconds=longest)}"


def _too_many(config: RunConfig, chosen: Sequence[Partition], names: str) -> str | None:
    allocated, most = allocation.of(config), max(partition.nodes for partition in chosen)
    if allocated.nodes <= most:
        return None
    return f"{allocated} are needed, and partition {names} has {most}; lower tp, pp, cp or dp"
