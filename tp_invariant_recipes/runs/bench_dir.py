"""The files of a benchmark's directory."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from tp_invariant_recipes.reading import Count, Seconds, parse_json
from tp_invariant_recipes.runs.run_dir import RunDir


class _Pass(TypedDict):
    mode: str
    round: Count
    warmup: Count
    steps: Count
    profile: bool


# A line of one rank's figures; `pass` is a keyword of Python.
Figures = TypedDict(
    "Figures",
    {
        "pass": Count,
        "mode": str,
        "round": Count,
        "profile": bool,
        "step": Count,
        "counts": bool,
        "seconds": Seconds,
        "tokens": Count,
        "memory": Literal["allocated", "reserved"],
        "peak_bytes": Count,
    },
)


@dataclass(frozen=True)
class Pass:
    """One training of the benchmark.

    round:   from 1 on; 0 for a profiled pass, which comes after all rounds.
    warmup:  steps before those that count.
    steps:   all of them.
    profile: whether rank 0 traces the last steps.
    """

    mode: str
    round: int
    warmup: int
    steps: int
    profile: bool = False


@dataclass(frozen=True)
class BenchDir(RunDir):
    """A benchmark's directory: the logs of a run directory, and below it one run directory for each mode."""

    @property
    def result(self) -> Path:
        """What the benchmark found."""
        return self.path / "bench.json"

    @property
    def passes(self) -> Path:
        """The passes in their order, as the ranks read them."""
        return self.path / "bench" / "passes.json"

    def figures(self, rank: int) -> Path:
        """Seconds and memory of every step, as one rank saw them."""
        return self.path / "bench" / f"rank-{rank}.jsonl"

    def trace(self, mode: str) -> Path:
        """The profiler's trace of rank 0, in Chrome's format."""
        return self.path / "bench" / f"trace-{mode}.json.gz"

    def mode(self, name: str) -> RunDir:
        """Configuration, environment and versions of a mode."""
        return RunDir(self.path / "modes" / name)

    def recorded(self, number: int) -> RunDir:
        """The ledger of a pass."""
        return RunDir(self.path / "bench" / f"pass-{number}")

    def write_passes(self, passes: tuple[Pass, ...]) -> None:
        """Write the passes. Raises RunError."""
        self.write(self.passes, [asdict(one) for one in passes])

    def read_passes(self) -> tuple[Pass, ...]:
        """The passes. Raises RunError when this is not a benchmark's directory."""
        passes = self._read(self.passes, parse_json, list[_Pass])
        return tuple(Pass(**{field.name: one[field.name] for field in fields(Pass)}) for one in passes)

    def read_figures(self, rank: int) -> list[dict[str, Any]]:
        """The lines of one rank. Raises RunError when there are none."""
        return self._read(self.figures(rank), _lines, list[Figures], limit=1 << 30)


def _lines(data: bytes) -> list[Any]:
    return [parse_json(line) for line in data.splitlines()]
