"""Compare the numbers in two logs, or in a log and a ledger, digit by digit. Equal digits do not prove equal bits."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any

from tp_invariant_recipes.compare.explanation import run_name
from tp_invariant_recipes.compare.log_parser import LOSS, NORM, RATE, Log, digits, is_count, printed_ledger
from tp_invariant_recipes.ledger.reader import Ledger, Progress

LedgerOrLog = Ledger | Log
# Fields in the order of execution. Other fields, such as other losses, come between loss and norm.
_BEFORE = ("consumed samples", "skipped samples", "global batch size", LOSS)
_AFTER = (NORM, "number of skipped iterations", "number of nan iterations", "loss scale", RATE)


class LogVerdict(Enum):
    """The verdict on printed numbers; it claims nothing about bits."""

    SAME = "the same as printed"
    DIFFERENT = "different as printed"
    NOT_COMPARABLE = "not comparable"


EXIT_STATUS = {LogVerdict.SAME: 0, LogVerdict.DIFFERENT: 1, LogVerdict.NOT_COMPARABLE: 2}


@dataclass(frozen=True)
class PrintedDifference:
    """The first field with different printed values; "" means that a line lacks it."""

    step: int
    name: str
    a: str
    b: str


@dataclass(frozen=True)
class PrintedComparison:
    """The result of comparing the printed numbers of `b` with those of `a`; at least one of them is a log."""

    verdict: LogVerdict
    a: LedgerOrLog
    b: LedgerOrLog
    steps_compared: int
    steps_differing: int
    first: PrintedDifference | None
    digits: dict[str, int | None]  # compared field -> digits that both print at every step; None: a count, exact
    only_a: tuple[str, ...]  # fields that only one run prints
    only_b: tuple[str, ...]
    mean: bool  # the log's loss is a mean over several steps, which a ledger does not have
    rounded: dict[str, int]  # field -> steps at which a ledger and a log differ by the one unit that rounding may cause

    @property
    def exit_status(self) -> int:
        """0 the same, 1 different, 2 not comparable."""
        return EXIT_STATUS[self.verdict]


def compare_printed(a: LedgerOrLog, b: LedgerOrLog, *, progress: Progress | None = None) -> PrintedComparison:
    """Compare all common fields, except measurements of the machine, at all common iterations.

    Two logs were printed by one kind of program, so their digits are compared as they are. The digits of a ledger are
    computed here, and programs round a number to fp32 before they print it or do not; both are correct, and they differ
    by at most one unit in the last digit.

    progress: told (steps read, steps of the ledger) now and then.
    """
    left, right = _as_logs(a, b, progress)
    names = _in_order([name for name in left.fields if name in right.fields])
    common = [number for number in left.iterations if number in right.iterations]
    differing: dict[int, PrintedDifference] = {}
    seen: dict[str, int | None] = {}
    rounded: Counter[str] = Counter()
    units = 1 if isinstance(a, Ledger) or isinstance(b, Ledger) else 0
    for number in common:
        for name in names:
            one, other = (log.iterations[number].get(name, "") for log in (left, right))
            if one is None or other is None:
                continue
            seen[name] = _fewest(seen.get(name), one, other)
            if alike(one, other):
                continue
            if alike(one, other, units):
                rounded[name] += 1
            else:
                differing.setdefault(number, PrintedDifference(number, name, one, other))
    numbers = [name for name, count in seen.items() if count is not None]
    return PrintedComparison(
        verdict=LogVerdict.NOT_COMPARABLE if not numbers else LogVerdict.DIFFERENT if differing else LogVerdict.SAME,
        a=a,
        b=b,
        steps_compared=len(common),
        steps_differing=len(differing),
        first=next(iter(differing.values()), None) if numbers else None,
        digits=seen,
        only_a=tuple(name for name in left.fields if name not in right.fields),
        only_b=tuple(name for name in right.fields if name not in left.fields),
        mean=LOSS in names and LOSS not in seen and max(left.interval, right.interval) > 1,
        rounded=dict(rounded),
    )


def alike(a: str, b: str, units: int = 0) -> bool:
    """Whether two texts show the same number, rounded to the digits of the shorter one.

    units: the number of units by which their last digits may differ. Of two powers of ten the smaller unit counts.
    """
    if a == b:
        return True
    try:
        numbers = Decimal(a), Decimal(b)
    except InvalidOperation:
        return False
    if is_count(a) or is_count(b) or not all(number.is_finite() for number in numbers):
        return False
    kept = min(digits(a), digits(b)) - 1
    one, other = (Decimal(f"{number:.{kept}E}") for number in numbers)
    if one == other:
        return True
    exponents = [int(number.as_tuple().exponent) for number in (one, other)]
    return bool(units) and abs(one - other) <= units * Decimal(1).scaleb(min(exponents))


def line(comparison: PrintedComparison) -> str:
    """The whole result in one line."""
    return f"{comparison.verdict.value}{_LINES[comparison.verdict](comparison)}"


def remarks(comparison: PrintedComparison) -> tuple[str, ...]:
    """Facts that a reader needs to judge the verdict; one sentence each."""
    sentences = []
    for run in (comparison.a, comparison.b):
        if isinstance(run, Log):
            sentences += [
                f"{run.path}: starts again at iteration {again} after iteration {last}; the later lines count."
                for last, again in run.restarts
            ]
            if run.broken:
                sentences.append(f"{run.path}: lines of an iteration that are cut or mixed up, left out: {run.broken}.")
        elif run.torn:
            sentences.append(f"{run_name(run)}: the last line is torn; the run was killed, or is writing it now.")
    if comparison.a.path.resolve() == comparison.b.path.resolve():
        sentences.append("Both are the same file, so this proves nothing.")
    if comparison.verdict is LogVerdict.NOT_COMPARABLE:
        return tuple(sentences)
    if comparison.mean:
        sentences.append(f"The {LOSS} of the log is a mean over several steps: not compared.")
    for run, only in ((comparison.a, comparison.only_a), (comparison.b, comparison.only_b)):
        if only:
            sentences.append(f"Only {called(run)} has {', '.join(only)}: not compared.")
    sentences += [
        f"The last printed digit of {name} differs by one unit at {steps} step{'s' * (steps > 1)}, as rounding may "
        "cause: not counted as a difference."
        for name, steps in comparison.rounded.items()
    ]
    sentences.append(
        "A log says little of model, data and seed: whether these are runs of one experiment is not checked."
    )
    return tuple(sentences)


def comparison_json(comparison: PrintedComparison) -> dict[str, Any]:
    """Everything, as JSON. Documented in docs/ledger.md."""
    return {
        "kind": "printed",
        "a": _run(comparison.a),
        "b": _run(comparison.b),
        "verdict": comparison.verdict.value,
        "text": line(comparison),
        "remarks": list(remarks(comparison)),
        "steps_compared": comparison.steps_compared,
        "steps_differing": comparison.steps_differing,
        "first_difference": asdict(comparison.first) if comparison.first else None,
        "digits": comparison.digits,
        "rounded": comparison.rounded,
        "only_a": list(comparison.only_a),
        "only_b": list(comparison.only_b),
    }


def called(run: LedgerOrLog) -> str:
    """The name of a run for people: its directory, or the file."""
    return run_name(run) if isinstance(run, Ledger) else str(run.path)


def _as_logs(a: LedgerOrLog, b: LedgerOrLog, progress: Progress | None) -> tuple[Log, Log]:
    if isinstance(a, Log):
        return a, b if isinstance(b, Log) else printed_ledger(b, a, progress)
    if isinstance(b, Log):
        return printed_ledger(a, b, progress), b
    raise TypeError("two ledgers are compared by their bits: ledger.compare.compare")


def _in_order(names: Sequence[str]) -> list[str]:
    middle = [name for name in names if name not in (*_BEFORE, *_AFTER)]
    return [name for name in (*_BEFORE, *middle, *_AFTER) if name in names]


def _fewest(before: int | None, *texts: str) -> int | None:
    """The digits of the shortest text; None: all are counts."""
    found = [digits(text) for text in texts if text and not is_count(text)]
    return min([*found, *([] if before is None else [before])], default=None)


def _run(run: LedgerOrLog) -> dict[str, Any]:
    steps = len(run.steps) if isinstance(run, Ledger) else len(run.iterations)
    return {"path": str(run.path), "log": isinstance(run, Log), "steps": steps}


def _steps(comparison: PrintedComparison) -> str:
    total = max(_run(run)["steps"] for run in (comparison.a, comparison.b))
    count = comparison.steps_compared
    return (f"{count} of {total}" if count != total else f"{count}") + (" step" if total == 1 else " steps")


def _same(comparison: PrintedComparison) -> str:
    fields = [
        name if count is None else f"{name} to {count} digit{'s' * (count > 1)}"
        for name, count in comparison.digits.items()
    ]
    return f": {_steps(comparison)}, {', '.join(fields)}; equal digits do not prove equal bits"


def _different(comparison: PrintedComparison) -> str:
    first = comparison.first
    assert first is not None  # the verdict "different" comes from a first difference
    values = " vs ".join(text or "not printed" for text in (first.a, first.b))
    return f" at step {first.step}: {first.name} {values}; {comparison.steps_differing} of {_steps(comparison)} differ"


def _not_comparable(comparison: PrintedComparison) -> str:
    runs = " and ".join(called(run) for run in (comparison.a, comparison.b))
    what = "number" if comparison.steps_compared else "iteration"
    return f": no {what} that both print in {runs}"


_LINES = {LogVerdict.SAME: _same, LogVerdict.DIFFERENT: _different, LogVerdict.NOT_COMPARABLE: _not_comparable}
