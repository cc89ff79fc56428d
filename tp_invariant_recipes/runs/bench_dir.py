"""The files of a benchmark's directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tp_invariant_recipes.reading import Count, Record, Seconds, parse_json
from tp_invariant_recipes.runs.run_dir import File, RunDir


@dataclass(frozen=True)
class Figures(Record):
    """One step as one rank saw it.

    pass_:      number of its pass. mode, round, profile: as the pass has them.
    counts:     whether its time counts.
    memory:     which memory `peak_bytes` is the most of.
    """

    pass_: Count
    mode: str
    round: Count
    profile: bool
    step: Count
    counts: bool
    seconds: Seconds
    tokens: Count
    memory: Literal["allocated", "reserved"]
    peak_bytes: Count


@dataclass(frozen=True)
class Pass(Record):
    """One training of the benchmark.

    round:   from 1 on; 0 for a profiled pass, which comes after all rounds.
    warmup:  steps before those that count.
    steps:   all of them.
    profile: whether rank 0 traces the last steps.
    """

    mode: str
    round: Count
    warmup: Count
    steps: Count
    profile: bool = False


@dataclass(frozen=True)
class BenchDir(RunDir):
    """A benchmark's directory: the logs of a run directory, and below it one run directory for each mode."""

    result = File("bench.json")  # what the benchmark found
    passes = File("bench/passes.json")  # the passes in their order, as the ranks read them

    def figures(self, rank: int) -> Path:
        """Seconds and memory of every step, as one rank saw them."""
        return self.path / "bench" / f"rank-{rank}.jsonl"

    def trace(self, mode: str) -> Path:
        """Return the profiler's trace of rank 0, in Chrome's format."""
        return self.path / "bench" / f"trace-{mode}.json.gz"

    def mode(self, name: str) -> RunDir:
        """Return configuration, environment and versions of a mode."""
        return RunDir(self.path / "modes" / name)

    def recorded(self, number: int) -> RunDir:
        """Return the ledger of a pass."""
        return RunDir(self.path / "bench" / f"pass-{number}")

    def read_passes(self) -> tuple[Pass, ...]:
        """Return the passes. Raises RunError when this is not a benchmark's directory."""
        return tuple(self._read(self.passes, parse_json, list[Pass]))

    def read_figures(self, rank: int) -> list[Figures]:
        """Return the lines of one rank. Raises RunError when there are none."""
        return self._read(self.figures(rank), _lines, list[Figures], limit=1 << 30)


def _lines(data: bytes) -> list[Any]:
    return [parse_json(line) for line in data.splitlines()]
