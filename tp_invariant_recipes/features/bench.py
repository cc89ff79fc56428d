# SPDX-License-Identifier: Apache-2.0
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

from tp_invariant_recipes.config.compose import Composed, compose
from tp_invariant_recipes.config.overrides import RESERVED, Override, check_reserved, given, parse, parse_all, texts
from tp_invariant_recipes.errors import OR_STOCK, ConfigError, Interrupted, RunError, refuse
from tp_invariant_recipes.launch import plan, train
from tp_invariant_recipes.launch.local import Outcome, Watch
from tp_invariant_recipes.launch.plan import TO_TRAIN, Plan, Planning
from tp_invariant_recipes.ledger.run_files import ProgressLine
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.numerics.mode import MEGATRONS, NAMES, STOCK
from tp_invariant_recipes.reading import checked, parse_json
from tp_invariant_recipes.result import Result
from tp_invariant_recipes.runs.lock import locked_empty
from tp_invariant_recipes.runs.run_dir import RunDir, choose_for_several
from tp_invariant_recipes.settings import environment
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.text import plural

_SUFFIXES = {
    "": ("ledger.digests=0",),
    "+digests": ("ledger.digests=1",),
    "+guard": ("ledger.digests=0", "guard=products"),
    "+digests+guard": ("ledger.digests=1", "guard=products"),
}
# Mode -> its overrides.
MODES = {f"{mode}{suffix}": (f"numerics={mode}", *added) for mode in NAMES for suffix, added in _SUFFIXES.items()}
# Overrides that a mode has no use for begin so.
_SHARDS = ("virtual_shards", "data_shards", "context_shards", "expert_groups", "grad_norm", "clip_rounding")
_OF_INVARIANT = ("device.peer_memory", *(f"numerics.{name}" for name in _SHARDS))
IDLE = dict.fromkeys(NAMES, ("comm_overlap.",)) | dict.fromkeys(MEGATRONS, _OF_INVARIANT)
# What a mode may have on -> the fields that say so; a field of another value than true is named with it.
_FUSED = (
    *("cross_entropy_loss", "gradient_accumulation", "masked_softmax", "bias_activation", "bias_dropout"),
    *("apply_rope", "moe_permute", "moe_router"),
)
ON = {
    "graphs": ("model.cuda_graph_impl",),
    "fused": tuple(f"model.{name}_fusion" for name in _FUSED),
    "overlapped": (
        *("ddp.overlap_grad_reduce", "ddp.overlap_param_gather", "comm_overlap.tp_comm_overlap"),
        *("model.overlap_p2p_comm", "model.overlap_moe_expert_parallel_comm"),
        *("comm_overlap.overlap_moe_expert_parallel_comm", "comm_overlap.delay_wgrad_compute"),
    ),
    "dispatcher": ("model.moe_token_dispatcher_type", "model.moe_flex_dispatcher_backend"),
}
# Of a GPU -> its TFLOPS in dense bf16 GEMMs, as NVIDIA states them (SXM).
PEAKS = {"H100": 989.4, "H200": 989.4, "GH200": 989.4, "B200": 2250.0, "B300": 2250.0}
UNSTEADY = 1.05  # a timed step that is so many times the median of the later ones, and is before them, is warm-up


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
    steps:       that count, of all rounds: the first ones do not while they are slower (UNSTEADY).
    tflops:      per rank, by Megatron's count of a step's operations; None: there is none.
    peak:        the share of the GPU's dense bf16 TFLOPS; None: they are not known.
    on:          graphs, fusions, overlaps and dispatcher of its configuration; of stock, also the environment.
    allocated_gib, reserved_gib: the most memory on the last rank's GPU; None: on a CPU. Graphs' own is reserved alone.
    time_ratio:  to the first mode, round by round; None: this is the first. memory_ratio: likewise, of the reserved.
    """

    mode: str
    step_ms: Spread
    rounds: tuple[float, ...]
    steps: int
    tokens_per_second: float
    tflops: float | None
    peak: float | None
    allocated_gib: float | None
    reserved_gib: float | None
    time_ratio: Spread | None
    memory_ratio: float | None
    on: dict[str, list[str]]


@dataclass(frozen=True)
class BenchResult(Result):
    """A finished benchmark, as `bench.json` holds it (docs/benchmark.md)."""

    directory: str
    model: str
    overrides: tuple[str, ...]
    device: str
    names: tuple[str, ...]
    ranks: int
    micro_batches: int
    warmup: int
    steps: int
    modes: tuple[ModeFigures, ...]
    schema: int = 3

    @property
    @override
    def exit_status(self) -> int:
        return 0

    @override
    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @override
    def lines(self) -> Iterator[str | Text | Table]:
        ranks = f"{plural(self.ranks, f'{self.device} rank')} ({', '.join(self.names)})"
        rounds = f"{plural(len(self.modes[0].rounds), 'round')} of {plural(self.steps, 'step')} after {self.warmup}"
        yield f"{' '.join([self.model, *self.overrides])} on {ranks}: {rounds}"
        yield f"micro-batches a step: {self.micro_batches}"
        titles = ("ms/step", "min–max", "tokens/s", "TFLOPS", "% peak", "GiB", "reserved", "× time", "× memory")
        columns = (Column(title, justify="right", no_wrap=True) for title in titles)
        table = Table(Column("mode", no_wrap=True), *columns, box=box.SIMPLE_HEAD, collapse_padding=True)
        for mode in self.modes:
            step, ratio = mode.step_ms, mode.time_ratio
            measured = [f"{step.median:.1f}", f"{step.min:.1f}–{step.max:.1f}", f"{mode.tokens_per_second:,.0f}"]
            share = 100 * mode.peak if mode.peak else None
            sizes = (mode.tflops, share, mode.allocated_gib, mode.reserved_gib)
            times = f"{ratio.median:.3f} ({ratio.min:.3f}–{ratio.max:.3f})" if ratio else "1"
            more = f"{mode.memory_ratio:.3f}" if mode.memory_ratio else ""
            table.add_row(Text(mode.mode), *measured, *(f"{size:.3g}" if size else "" for size in sizes), times, more)
        yield table
        yield f"×: times {self.modes[0].mode}, the median of the rounds' ratios"
        for mode in self.modes:
            on = "; ".join(f"{what} {', '.join(names)}" for what, names in mode.on.items())
            yield f"{mode.mode}: {on or 'no graphs, fusions or overlaps'}"
            if mode.steps < self.steps * len(mode.rounds):
                yield f"{mode.mode}: {plural(mode.steps, 'step')} of {self.steps * len(mode.rounds)} were steady"


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
    return Bench(where, tuple(turns), steps)


def _composed(
    model: str, overrides: Sequence[Override], modes: Sequence[str], problems: list[str]
) -> dict[str, Composed]:
    """Compose each mode as its users run it, with CUDA graphs where it has them. ConfigError: problems of all."""
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
    return composed


def execute(bench: Bench, watch: Watch) -> BenchResult:
    """Train every turn, and write `bench.json`. watch: takes a turn's name. Raises RunError, Interrupted."""
    from tp_invariant_recipes.features.train import rank

    stopped = f"the benchmark was stopped before its end; what it trained: {bench.directory.path}"
    with locked_empty(bench.directory):
        try:
            for number, mode, planned in bench.turns:
                with watch(f"round {number} of {bench.turns[-1][0]}, {mode}", planned) as tick:
                    if train.execute(planned, tick, rank_fn=rank.train) is Outcome.STOPPED:
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
        micro_batches=first.config.train["global_batch_size"]
        // (first.layout.dp * first.config.train["micro_batch_size"]),
        warmup=first.steps - bench.timed,
        steps=bench.timed,
        modes=tuple(modes),
    )


def _figures(mode: str, bench: Bench, runs: Sequence[Sequence[ProgressLine]], first: ModeFigures | None) -> ModeFigures:
    """Return a mode's figures. runs: the steps of each round. first: of the first mode, for ratios within a round."""
    planned = bench.plans[mode]
    step_ms = [steady([1000 * line.seconds for line in run[-bench.timed :]]) for run in runs]
    spread, rounds = Spread.of([ms for run in step_ms for ms in run]), tuple(median(run) for run in step_ms)
    memory = [max(getattr(run[-1], name) for run in runs) / 2**30 for name in ("peak_memory", "peak_reserved")]
    allocated, reserved_gib = (most or None for most in memory)
    # A line counts the operations of the steps before it.
    operations = runs[0][-1].flops - runs[0][-2].flops if len(runs[0]) > 1 else 0.0
    tflops = operations / spread.median / 1e9 / planned.layout.world if operations else None
    names = [gpu.name for gpu in gpus.visible()] if planned.device == "gpu" else []
    peak = next((most for card, most in PEAKS.items() if names and card in names[0]), None)
    return ModeFigures(
        mode=mode,
        step_ms=spread,
        rounds=rounds,
        steps=sum(map(len, step_ms)),
        tokens_per_second=1000 * runs[0][-1].tokens / spread.median,
        tflops=tflops,
        peak=tflops / peak if tflops and peak else None,
        allocated_gib=allocated,
        reserved_gib=reserved_gib,
        time_ratio=Spread.of([own / other for other, own in zip(first.rounds, rounds, strict=True)]) if first else None,
        memory_ratio=reserved_gib / first.reserved_gib if first and reserved_gib and first.reserved_gib else None,
        on=switched_on(planned.config),
    )


def steady(step_ms: Sequence[float]) -> Sequence[float]:
    """Return the steps from the first on that is no slower than the later ones; half of them, at least."""
    begins = (n for n in range(len(step_ms) // 2) if step_ms[n] <= UNSTEADY * median(step_ms[n + 1 :]))
    return step_ms[next(begins, len(step_ms) // 2) :]


def switched_on(config: RunConfig) -> dict[str, list[str]]:
    """Return what makes a configuration fast: "fused" -> ["apply_rope_fusion"]; or stock slow: "environment"."""
    on: dict[str, list[str]] = {}
    for what, paths in ON.items():
        values = {
            path.rpartition(".")[2]: config.at(path) for path in paths if config.at(path) not in (None, False, "none")
        }
        if values:
            on[what] = [name if value is True else str(value) for name, value in values.items()]
    if config.numerics.mode == STOCK and (variables := environment.chosen(config)):
        on["environment"] = variables
    return on
