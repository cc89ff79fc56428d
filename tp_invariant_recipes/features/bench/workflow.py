"""`tpi bench`: plan one run per mode, train them in turn on the same ranks, report."""

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from tp_invariant_recipes.config import graph_choice, reserved
from tp_invariant_recipes.config.bounds import LARGEST
from tp_invariant_recipes.config.compose import Composed, compose
from tp_invariant_recipes.config.overrides import Override, given, parse_all, texts
from tp_invariant_recipes.errors import OR_STOCK, ConfigError, Interrupted, RunError, refuse
from tp_invariant_recipes.features.bench import profile, rank
from tp_invariant_recipes.features.bench.profile import Trace
from tp_invariant_recipes.launch import local, plan, record
from tp_invariant_recipes.launch.plan import TO_TRAIN, Plan, Planning
from tp_invariant_recipes.machine import gpus, python_speed
from tp_invariant_recipes.machine.versions import versions
from tp_invariant_recipes.numerics.mode import STOCK
from tp_invariant_recipes.runs.bench_dir import BenchDir, Figures, Pass
from tp_invariant_recipes.runs.lock import locked_empty
from tp_invariant_recipes.runs.run_dir import choose_for_several
from tp_invariant_recipes.settings import environment

MOST_ROUNDS = 10_000
# After a mode's name: with digests of all gradients and weights at every step; with a guard.
DIGESTS, GUARD = "+digests", "+guard"
# Fields without a meaning for numerics=stock.
INVARIANT = (
    "numerics.virtual_shards",
    "numerics.data_shards",
    "numerics.context_shards",
    "numerics.expert_groups",
    "numerics.grad_norm",
    "numerics.clip_rounding",
    "device.peer_memory",
)


@dataclass(frozen=True)
class Bench:
    """A benchmark, ready to start.

    plans: mode -> its run; the first is the others' reference. passes: the trainings, in order.
    """

    directory: BenchDir
    plans: dict[str, Plan]
    passes: tuple[Pass, ...]

    @property
    def first(self) -> Plan:
        """The run of the first mode. All modes share its layout, device and environment."""
        return next(iter(self.plans.values()))


def new(
    model: str,
    overrides: Sequence[str],
    modes: Sequence[str],
    *,
    rounds: int,
    warmup: int,
    steps: int,
    traced: bool,
    directory: Path | None,
    how: Planning = TO_TRAIN,
) -> Bench:
    """Plan a benchmark; nothing is written. Raises a TpiError that lists the problems of all modes."""
    decided, sound = reserved.check("bench", parse_all(overrides))
    problems = [*_count_problems(rounds, warmup, steps), *_modes_problems(modes), *decided]
    length = min(max(warmup + steps, 1), LARGEST)
    composed = _composed_alike(model, sound, modes, length, problems)
    where = BenchDir(choose_for_several(directory, f"bench-{model}-tp{(composed[modes[0]].config).layout.tp}"))
    plans = {mode: plan.resolve_beside(composed[mode], where.mode(mode), where.index_cache, how) for mode in modes}
    if any(planned.environment != plans[modes[0]].environment for planned in plans.values()):
        raise ConfigError("these modes need different environment variables, which one process cannot have")
    turns = [Pass(mode, number, warmup, length) for number in range(1, rounds + 1) for mode in modes]
    if traced:
        turns += [Pass(mode, 0, warmup, warmup + 1 + profile.TRACED, profile=True) for mode in modes]
    return Bench(where, plans, tuple(turns))


def _count_problems(rounds: int, warmup: int, steps: int) -> list[str]:
    counts = (("--rounds", rounds, 1, MOST_ROUNDS), ("--warmup", warmup, 0, LARGEST), ("--steps", steps, 1, LARGEST))
    return [
        *(f"{option} {value}: must be at least {least}" for option, value, least, _ in counts if value < least),
        *(f"{option} {value}: must be at most {most}" for option, value, _, most in counts if value > most),
    ]


def _composed_alike(
    model: str, overrides: Sequence[Override], modes: Sequence[str], length: int, problems: list[str]
) -> dict[str, Composed]:
    """Return the runs of all modes, of so many steps, with the CUDA graphs that each would have in a long run."""
    long = max(length, *graph_choice.LEAST_STEPS.values())
    composed = _composed(model, [*overrides, f"iters={long}", "save=0"], modes, problems)
    graphs: Mapping[str, str] = {}
    if any(run.graphs is not None and run.config.device.kind == "gpu" for run in composed.values()):
        others = (override for override in overrides if override.path != graph_choice.GROUP)
        overrides, graphs = [*others], _graphs(composed)
    return _composed(model, [*overrides, f"iters={length}", "save=0"], modes, problems, graphs)


def execute(bench: Bench, watch: Callable[[], None]) -> dict[str, Any]:
    """Write the directory, train every pass, and return what `bench.json` holds. Raises RunError, Interrupted."""
    with locked_empty(bench.directory):
        job = replace(bench.first, run_dir=bench.directory)
        stopped = f"the benchmark was stopped before its end; the steps it took: {bench.directory.figures(0)}"
        for planned in bench.plans.values():
            record.write(planned)
        bench.directory.write(bench.directory.passes, [bench_pass.as_json() for bench_pass in bench.passes])
        speed = python_speed.milliseconds()  # while nothing else runs
        try:
            outcome = local.run(job, watch, rank_fn=rank.measure, process_groups=len(bench.passes))
        except KeyboardInterrupt:
            raise Interrupted(stopped) from None
        if outcome is local.Outcome.STOPPED:
            raise RunError(stopped)
        _check_complete(bench)
        report = result(bench, speed)
        bench.directory.write(bench.directory.result, report)
        return report


def _check_complete(bench: Bench) -> None:
    """Raise RunError when the ranks ended without a failure, but before the last step of the last pass."""
    for rank_number in range(bench.first.layout.world):
        file = bench.directory.figures(rank_number)
        lines = bench.directory.read_figures(rank_number) if file.exists() else []
        for number, bench_pass in enumerate(bench.passes):
            if (taken := sum(line.pass_ == number for line in lines)) != bench_pass.steps:
                raise RunError(
                    f"the ranks ended at step {taken} of {bench_pass.steps} of {bench_pass.mode}, pass {number + 1} of "
                    f"{len(bench.passes)}, and nothing had failed: {bench.directory.bridge_log}"
                )


def result(bench: Bench, host_python_ms: float) -> dict[str, Any]:
    """Return the result of a finished benchmark, as JSON. host_python_ms: as of machine/python_speed.py."""
    first = bench.first
    report = {
        "directory": str(bench.directory.path),
        "model": first.composed.model,
        "overrides": list(texts(reserved.check("bench", first.composed.overrides)[1])),
        "layout": first.layout.as_dict(),
        "ranks": first.layout.world,
        "device": _device(first),
        "host": os.uname().nodename,
        "host_python_ms": host_python_ms,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(["tpi", *sys.argv[1:]]),
        "versions": versions(),
        "environment": environment.recorded(os.environ | first.environment),
        "rounds": max(bench_pass.round for bench_pass in bench.passes),
        "warmup": bench.passes[0].warmup,
        "steps": bench.passes[0].steps - bench.passes[0].warmup,
        "order": [bench_pass.mode for bench_pass in bench.passes if not bench_pass.profile],
        "modes": _modes(bench),
    }
    traces = {
        bench_pass.mode: profile.read(bench.directory.trace(bench_pass.mode))
        for bench_pass in bench.passes
        if bench_pass.profile
    }
    if not traces:
        return report
    base = next(iter(traces.values()))
    modes = [_traced(bench, mode, trace, base) for mode, trace in traces.items()]
    return report | {"profile": {"rank": 0, "steps": profile.TRACED, "modes": modes}}


def _modes_problems(modes: Sequence[str]) -> list[str]:
    if not modes:
        return ["--modes: name at least one, as in --modes stock,tree"]
    return [f"--modes: {mode} is named twice" for mode in dict.fromkeys(modes) if modes.count(mode) > 1]


def _graphs(composed: Mapping[str, Composed]) -> dict[str, str]:
    """Get the option of cuda_graph that each mode has chosen; off for all where one has chosen it."""
    chosen = {mode: str(run.graphs).partition(":")[0] for mode, run in composed.items()}
    return dict.fromkeys(chosen, graph_choice.OFF) if graph_choice.OFF in chosen.values() else chosen


def _composed(
    model: str,
    overrides: Sequence[str | Override],
    modes: Sequence[str],
    problems: list[str],
    graphs: Mapping[str, str] | None = None,
) -> dict[str, Composed]:
    """Compose each mode. Raises ConfigError that lists `problems` and the problems of all modes, each once.

    graphs: the option of cuda_graph of each mode; None: as the overrides say.
    """
    device = plan.detect_device()
    composed: dict[str, Composed] = {}
    for mode in modes:
        try:
            numerics, extras = _named(mode)
            recorded = [f"ledger.digests={int(DIGESTS in extras)}"]
            recorded += [f"{graph_choice.GROUP}={graphs[mode]}"] if graphs else []
            read = [
                override for override in parse_all(overrides) if numerics != STOCK or override.path not in INVARIANT
            ]
            if GUARD not in extras:
                read = [override for override in read if not override.field.startswith("guard.")]
            elif not given(read, "guard.kind"):
                recorded.append("guard=products")
            composed[mode] = compose(model, [*read, f"numerics={numerics}", *recorded], device=device)
        except ConfigError as error:
            problems += (problem for problem in error.problems if problem not in (*problems, OR_STOCK))
    refuse(problems)
    return composed


def _named(mode: str) -> tuple[str, set[str]]:
    extras: set[str] = set()
    while extra := next((suffix for suffix in (DIGESTS, GUARD) if mode.endswith(suffix)), None):
        mode = mode.removesuffix(extra)
        extras.add(extra)
    return mode, extras


def _device(first: Plan) -> dict[str, Any]:
    if first.device == "cpu":
        return {"kind": "cpu", "names": [os.uname().machine], "processors": os.cpu_count()}
    used = gpus.visible()[: first.layout.world]
    return {
        "kind": "gpu",
        "names": [gpu.name for gpu in used],
        "compute_capability": sorted({f"{gpu.capability[0]}.{gpu.capability[1]}" for gpu in used}),
        "memory_gib": [gpu.memory / 2**30 for gpu in used],
    }


def _modes(bench: Bench) -> list[dict[str, Any]]:
    ranks = [bench.directory.read_figures(rank) for rank in range(bench.first.layout.world)]
    measured: dict[str, list[dict[str, Any]]] = {mode: [] for mode in bench.plans}
    for number, bench_pass in enumerate(bench.passes):
        if not bench_pass.profile:
            measured[bench_pass.mode].append(_round(ranks, number))
    base = next(iter(measured.values()))
    return [_mode(mode, rounds, base) for mode, rounds in measured.items()]


def _round(ranks: list[list[Figures]], number: int) -> dict[str, Any]:
    lines = [[line for line in rank if line.pass_ == number and line.counts] for rank in ranks]
    steps = zip(*([line.seconds for line in rank] for rank in lines), strict=True)
    milliseconds = [1000 * max(step) for step in steps]  # a step takes as long as its slowest rank
    return {
        "pass": number,
        "median_ms": median(milliseconds),
        "step_ms": milliseconds,
        "tokens": lines[0][0].tokens,
        "memory": lines[0][0].memory,
        "peak_bytes": max(line.peak_bytes for rank in lines for line in rank),
    }


def _mode(mode: str, rounds: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    step = spread([ms for figures in rounds for ms in figures["step_ms"]])
    peak = max(figures["peak_bytes"] for figures in rounds)
    return {
        "mode": mode,
        "step_ms": step,
        "tokens_per_second": 1000 * rounds[0]["tokens"] / step["median"],
        "memory": rounds[0]["memory"],
        "peak_gib": peak / 2**30 if peak else None,  # not measured on a CPU
        "time_ratio": None if rounds is base else _ratio(base, rounds, "median_ms"),
        "memory_ratio": None if rounds is base or not peak else _ratio(base, rounds, "peak_bytes"),
        "rounds": rounds,
    }


def _ratio(base: list[dict[str, Any]], rounds: list[dict[str, Any]], figure: str) -> dict[str, float]:
    """One ratio per round, so that anything that slows a whole round down cancels out."""
    return spread([other[figure] / first[figure] for first, other in zip(base, rounds, strict=True)])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest. Raises StatisticsError when there are none."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def _traced(bench: Bench, mode: str, trace: Trace, base: Trace) -> dict[str, Any]:
    more = profile.difference(base.kernels, trace.kernels)
    return {
        "mode": mode,
        "trace": str(bench.directory.trace(mode)),
        "step_ms": trace.milliseconds,
        "idle_ms": trace.idle,
        "idle_share": trace.idle_share,
        "waiting_ms": trace.waiting,
        "limit": trace.limit,
        "milliseconds": sum(k.milliseconds for k in trace.kernels),
        "milliseconds_without_collectives": sum(
            k.milliseconds for k in trace.kernels if k.category != profile.COLLECTIVES
        ),
        "launches": sum(k.launches for k in trace.kernels),
        "categories": {
            name: {"milliseconds": k.milliseconds, "launches": k.launches}
            for name, k in profile.by_category(trace.kernels).items()
        },
        "extra": [] if trace is base else [asdict(k) for k in more[: profile.LARGEST] if k.milliseconds > 0],
        "kernels": [asdict(k) for k in trace.kernels],
    }
