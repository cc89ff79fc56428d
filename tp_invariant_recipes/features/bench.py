"""`tpi bench`: train each mode in turn, and read the times of the steps from `progress.jsonl`."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, override

from rich import box
from rich.table import Column, Table
from rich.text import Text

from tp_invariant_recipes.config import graph_choice
from tp_invariant_recipes.config.compose import Composed, compose
from tp_invariant_recipes.config.overrides import RESERVED, Override, check_reserved, given, parse, parse_all, texts
from tp_invariant_recipes.errors import OR_STOCK, ConfigError, Interrupted, RunError, refuse
from tp_invariant_recipes.features.train import workflow as train
from tp_invariant_recipes.launch import plan
from tp_invariant_recipes.launch.local import Outcome, Watch
from tp_invariant_recipes.launch.plan import TO_TRAIN, Plan, Planning
from tp_invariant_recipes.ledger.run_files import ProgressLine
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.numerics.mode import MODES as INVARIANT_MODES
from tp_invariant_recipes.numerics.mode import STOCK
from tp_invariant_recipes.reading import checked, parse_json
from tp_invariant_recipes.result import Result
from tp_invariant_recipes.runs.lock import locked_empty
from tp_invariant_recipes.runs.run_dir import RunDir, choose_for_several
from tp_invariant_recipes.text import counted

_SUFFIXES = {
    "": ("ledger.digests=0",),
    "+digests": ("ledger.digests=1",),
    "+guard": ("ledger.digests=0", "guard=products"),
    "+digests+guard": ("ledger.digests=1", "guard=products"),
}
# Mode -> its overrides.
MODES = {
    f"{mode}{suffix}": (f"numerics={mode}", *added)
    for mode in (STOCK, *INVARIANT_MODES)
    for suffix, added in _SUFFIXES.items()
}
# Overrides that a mode has no use for begin so.
_SHARDS = ("virtual_shards", "data_shards", "context_shards", "expert_groups", "grad_norm", "clip_rounding")
IDLE = {STOCK: ("device.peer_memory", *(f"numerics.{name}" for name in _SHARDS))}


@dataclass(frozen=True)
class Bench:
    """A benchmark, ready to start. turns: round, mode and run of each training, in order. timed: steps that count."""

    directory: RunDir
    turns: tuple[tuple[int, str, Plan], ...]
    timed: int

    @property
    def plans(self) -> dict[str, Plan]:
        """Mode -> its run in the first round; the first mode is the others' reference."""
        return {mode: planned for number, mode, planned in self.turns if number == 1}


@dataclass(frozen=True)
class Spread:
    """Of several values."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return those of at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class ModeFigures:
    """What a mode took.

    step_ms:     of the timed steps of all rounds, in milliseconds. rounds: the medians of the rounds.
    tflops:      per rank, by Megatron's count of a step's operations; None: there is none.
    allocated_gib, reserved_gib: the most memory on the last rank's GPU; None: on a CPU. Graphs' own is reserved alone.
    time_ratio:  to the first mode, round by round; None: this is the first. memory_ratio: likewise, of the reserved.
    """

    mode: str
    step_ms: Spread
    rounds: tuple[float, ...]
    tokens_per_second: float
    tflops: float | None
    allocated_gib: float | None
    reserved_gib: float | None
    time_ratio: Spread | None
    memory_ratio: float | None


@dataclass(frozen=True)
class BenchResult(Result):
    """A finished benchmark, as `bench.json` holds it (docs/benchmark.md)."""

    directory: str
    model: str
    overrides: tuple[str, ...]
    device: str
    names: tuple[str, ...]
    ranks: int
    warmup: int
    steps: int
    modes: tuple[ModeFigures, ...]
    schema: int = 2

    @property
    @override
    def exit_status(self) -> int:
        return 0

    @override
    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @override
    def lines(self) -> Iterator[str | Text | Table]:
        ranks = f"{counted(self.ranks, f'{self.device} rank')} ({', '.join(self.names)})"
        rounds = f"{counted(len(self.modes[0].rounds), 'round')} of {counted(self.steps, 'step')} after {self.warmup}"
        yield f"{' '.join([self.model, *self.overrides])} on {ranks}: {rounds}"
        titles = ("ms/step", "min–max", "tokens/s", "TFLOPS", "GiB", "reserved", "× time", "min–max", "× memory")
        columns = (Column(title, justify="right", no_wrap=True) for title in titles)
        table = Table(Column("mode", no_wrap=True), *columns, box=box.SIMPLE_HEAD, collapse_padding=True)
        for mode in self.modes:
            step, ratio = mode.step_ms, mode.time_ratio
            measured = [f"{step.median:.1f}", f"{step.min:.1f}–{step.max:.1f}", f"{mode.tokens_per_second:,.0f}"]
            sizes = [f"{size:.3g}" if size else "" for size in (mode.tflops, mode.allocated_gib, mode.reserved_gib)]
            times = [f"{ratio.median:.3f}", f"{ratio.min:.3f}–{ratio.max:.3f}"] if ratio else ["1", ""]
            more = f"{mode.memory_ratio:.3f}" if mode.memory_ratio else ""
            table.add_row(Text(mode.mode), *measured, *sizes, *times, more)
        yield table
        yield f"×: times {self.modes[0].mode}, the median of the rounds' ratios"


def new(
    model: str,
    overrides: Sequence[str],
    modes: Sequence[str],
    *,
    rounds: int,
    warmup: int,
    steps: int,
    directory: Path | None,
    how: Planning = TO_TRAIN,
) -> Bench:
    """Plan a benchmark; nothing is written. Raises a TpiError that lists the problems of all modes."""
    problems, sound = check_reserved("bench", parse_all(overrides))
    if not modes or any(mode not in MODES or modes.count(mode) > 1 for mode in modes):
        known = ", ".join(mode for mode in MODES if "+" not in mode)
        problems.append(f"--modes {','.join(modes)}: name modes once each, of {known}, each with +digests, +guard")
    sound += [parse(f"iters={warmup + steps}"), parse("save=0")]
    composed = _composed(model, sound, [mode for mode in modes if mode in MODES], problems)
    where = RunDir(choose_for_several(directory, f"bench-{model}-tp{composed[modes[0]].config.layout.tp}"))
    turns = [
        (number, mode, plan.resolve_beside(run, RunDir(where.path / f"{number}-{mode}"), where.index_cache, how))
        for number in range(1, rounds + 1)
        for mode, run in composed.items()
    ]
    if any(run.device == "cpu" and run.environment != turns[0][2].environment for *_, run in turns):
        raise ConfigError("these modes need different environment variables, which one process cannot have")
    return Bench(where, tuple(turns), steps)


def _composed(
    model: str, overrides: Sequence[Override], modes: Sequence[str], problems: list[str]
) -> dict[str, Composed]:
    """Compose each mode. Where one can capture no CUDA graphs, none does. ConfigError: `problems`, and those of all."""
    device, composed = plan.detect_device(), {}
    for mode in modes:
        idle = IDLE.get(mode.partition("+")[0], ()) + (() if "+guard" in mode else ("guard.",))
        words = [word for word in overrides if not word.field.startswith(idle)]
        words += [word for word in parse_all(MODES[mode]) if not given(words, word.field)]
        try:
            composed[mode] = compose(model, words, device=device)
        except ConfigError as error:
            problems += (problem for problem in error.problems if problem not in (*problems, OR_STOCK))
    refuse(problems)
    graphs = {str(run.graphs).partition(":")[0] for run in composed.values() if run.graphs is not None}
    if graph_choice.OFF in graphs and len(graphs) > 1:
        others = [word for word in overrides if word.path != graph_choice.GROUP]
        return _composed(model, [*others, parse(f"{graph_choice.GROUP}={graph_choice.OFF}")], modes, [])
    return composed


def execute(bench: Bench, watch: Watch) -> BenchResult:
    """Train every turn, and write `bench.json`. watch: takes a turn's name. Raises RunError, Interrupted."""
    stopped = f"the benchmark was stopped before its end; what it trained: {bench.directory.path}"
    with locked_empty(bench.directory):
        try:
            for number, mode, planned in bench.turns:
                with watch(f"round {number} of {bench.turns[-1][0]}, {mode}", planned) as tick:
                    if train.execute(planned, tick) is Outcome.STOPPED:
                        raise RunError(stopped)
        except KeyboardInterrupt:
            raise Interrupted(stopped) from None
        bench.directory.write(bench.directory.path / "bench.json", (found := result(bench)).as_json())
        return found


def result(bench: Bench) -> BenchResult:
    """Return the figures of a benchmark whose trainings have ended."""
    modes: list[ModeFigures] = []
    for name in bench.plans:
        logs = [planned.run_dir.progress.read_bytes() for _, mode, planned in bench.turns if mode == name]
        runs = [[checked(ProgressLine, parse_json(line, constants=True)) for line in t.splitlines()] for t in logs]
        modes.append(_figures(name, bench, runs, modes[0] if modes else None))
    first = bench.turns[0][2]
    names = {os.uname().machine} if first.device == "cpu" else {g.name for g in gpus.visible()[: first.layout.world]}
    return BenchResult(
        directory=str(bench.directory.path),
        model=first.composed.model,
        overrides=texts(word for word in first.composed.overrides if word.field not in RESERVED["bench"]),
        device=first.device,
        names=tuple(sorted(names)),
        ranks=first.layout.world,
        warmup=first.steps - bench.timed,
        steps=bench.timed,
        modes=tuple(modes),
    )


def _figures(mode: str, bench: Bench, runs: Sequence[Sequence[ProgressLine]], first: ModeFigures | None) -> ModeFigures:
    """Return a mode's figures. runs: the steps of each round. first: of the first mode, for ratios within a round."""
    step_ms = [[1000 * line.seconds for line in run[-bench.timed :]] for run in runs]
    spread, rounds = Spread.of([ms for run in step_ms for ms in run]), tuple(median(run) for run in step_ms)
    memory = [max(getattr(run[-1], name) for run in runs) / 2**30 for name in ("peak_memory", "peak_reserved")]
    allocated, reserved_gib = (most or None for most in memory)
    # A line counts the operations of the steps before it.
    operations = runs[0][-1].flops - runs[0][-2].flops if len(runs[0]) > 1 else 0.0
    return ModeFigures(
        mode=mode,
        step_ms=spread,
        rounds=rounds,
        tokens_per_second=1000 * runs[0][-1].tokens / spread.median,
        tflops=operations / spread.median / 1e9 / bench.turns[0][2].layout.world if operations else None,
        allocated_gib=allocated,
        reserved_gib=reserved_gib,
        time_ratio=Spread.of([own / other for other, own in zip(first.rounds, rounds, strict=True)]) if first else None,
        memory_ratio=reserved_gib / first.reserved_gib if first and reserved_gib and first.reserved_gib else None,
    )
