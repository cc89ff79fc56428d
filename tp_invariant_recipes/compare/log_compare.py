"""Compare the numbers that two logs of Megatron-LM or Megatron-Bridge print. Equal digits do not prove equal bits.

    [2026-01-31 09:16:19] iteration        1/     100 | consumed samples:            8 | elapsed time per iteration
    (ms): 176.4 | learning rate: 3.000000E-05 | global batch size:     8 | lm loss: 1.254514E+01 | loss scale: 1.0 |
    grad norm: 32.962 | number of skipped iterations:   0 | number of nan iterations:   0 |

(one line in the log). A loss that is not a number is missing in its line.
"""

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tp_invariant_recipes.ledger.open import beginning
from tp_invariant_recipes.ledger.reader import CERTIFICATE_START, contents, one_file
from tp_invariant_recipes.ledger.schema import KIND
from tp_invariant_recipes.plural import counted

SAME, DIFFERENT, NOT_COMPARABLE = "the same as printed", "different as printed", "not comparable"
EXIT_STATUS = {SAME: 0, DIFFERENT: 1, NOT_COMPARABLE: 2}

_ITERATION = re.compile(r"\biteration +(\d+)/ *\d+ +\|(.*)\|$")  # after any prefix with a rank, a host or a time
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_FIELD = re.compile(r"\s*(\S.*?)\s*:\s*(\S+)\s*")
# Measurements of the machine, not results.
_MEASURED = re.compile(r"elapsed|throughput|flop|per second|per gpu|/s\b|energy|power|memory|\btime\b", re.IGNORECASE)
_UNCHECKED = "A log says little of model, data and seed: whether these are runs of one experiment is not checked."


@dataclass(frozen=True)
class Log:
    """The iterations that a log prints: number → field → text. Of a repeated iteration the last line counts."""

    path: Path
    iterations: dict[int, dict[str, str]]


@dataclass(frozen=True)
class PrintedDifference:
    """The first field with different printed values; "" means that a line lacks it."""

    step: int
    name: str
    a: str
    b: str


@dataclass(frozen=True)
class LogComparison:
    """The result of comparing the printed numbers of `b` with those of `a`. fields: that both print."""

    a: Log
    b: Log
    steps_compared: int
    steps_differing: int
    fields: tuple[str, ...]
    first: PrintedDifference | None

    @property
    def verdict(self) -> str:
        """One of EXIT_STATUS; it claims nothing about bits."""
        if not self.fields:
            return NOT_COMPARABLE
        return DIFFERENT if self.first else SAME

    @property
    def exit_status(self) -> int:
        """0 the same, 1 different, 2 not comparable."""
        return EXIT_STATUS[self.verdict]


def read_log(path: Path) -> Log | None:
    """The log in a file. None: the path is a directory or a ledger, or no line shows a whole iteration.

    LedgerError: the file cannot be read.
    """
    if os.path.isdir(path):
        return None
    start = (beginning(path) or b"").partition(b"\n")[0]
    if start.startswith(CERTIFICATE_START) or (start.startswith(b"{") and KIND.encode() in start):
        return None
    log = parse_log(path, contents(path).decode(errors="replace"))
    return log if log.iterations else None


def parse_log(path: Path, text: str) -> Log:
    """The iterations of a log's text; `path` names it. Lines that are cut or mixed up are left out."""
    lines = (_ITERATION.search(_COLOUR.sub("", line).rstrip()) for line in text.splitlines())
    return Log(path, {int(line[1]): _fields(line[2]) for line in lines if line})


def compare_logs(a: Log, b: Log) -> LogComparison:
    """Compare the texts of all common fields, except measurements of the machine, at all common iterations."""
    common = sorted(a.iterations.keys() & b.iterations.keys())
    printed = [{name for step in common for name in log.iterations[step]} for log in (a, b)]
    fields = tuple(name for name in _in_order(a) if name in printed[0] & printed[1])
    found = []
    for step in common:
        pairs = ((name, *(log.iterations[step].get(name, "") for log in (a, b))) for name in fields)
        found += [next((PrintedDifference(step, *pair) for pair in pairs if pair[1] != pair[2]), None)]
    differing = [one for one in found if one]
    return LogComparison(a, b, len(common), len(differing), fields, differing[0] if differing else None)


def line(comparison: LogComparison) -> str:
    """The whole result in one line."""
    a, b, first = comparison.a, comparison.b, comparison.first
    count, total = comparison.steps_compared, max(len(a.iterations), len(b.iterations))
    steps = counted(total, "step") if count == total else f"{count} of {counted(total, 'step')}"
    if not comparison.fields:
        return f"{NOT_COMPARABLE}: no iteration that both print in {a.path} and {b.path}"
    if first is None:
        return f"{SAME}: {steps}, {', '.join(comparison.fields)}; equal digits do not prove equal bits"
    values = f"{first.a or 'not printed'} vs {first.b or 'not printed'}"
    return f"{DIFFERENT} at step {first.step}: {first.name} {values}; {comparison.steps_differing} of {steps} differ"


def remarks(comparison: LogComparison) -> tuple[str, ...]:
    """Facts that a reader needs to judge the verdict; one sentence each."""
    same_file = one_file(comparison.a.path, comparison.b.path)
    same = ["Both are the same file, so this proves nothing."] if same_file else []
    return (*same, _UNCHECKED) if comparison.fields else tuple(same)


def comparison_json(comparison: LogComparison) -> dict[str, Any]:
    """Everything, as JSON. Documented in docs/ledger.md."""
    return {
        "kind": "printed",
        "a": {"path": str(comparison.a.path), "steps": len(comparison.a.iterations)},
        "b": {"path": str(comparison.b.path), "steps": len(comparison.b.iterations)},
        "verdict": comparison.verdict,
        "text": line(comparison),
        "remarks": list(remarks(comparison)),
        "steps_compared": comparison.steps_compared,
        "steps_differing": comparison.steps_differing,
        "fields": list(comparison.fields),
        "first_difference": asdict(comparison.first) if comparison.first else None,
    }


def _fields(rest: str) -> dict[str, str]:
    found = (_FIELD.fullmatch(part) for part in rest.split("|"))
    return {match[1]: match[2] for match in found if match and not _MEASURED.search(match[1])}


def _in_order(log: Log) -> list[str]:
    """The fields of all lines, in the order of printing."""
    return list(dict.fromkeys(name for fields in log.iterations.values() for name in fields))
