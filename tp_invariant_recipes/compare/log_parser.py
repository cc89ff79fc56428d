"""Training logs of Megatron-LM and Megatron-Bridge: their numbers, as printed.

    [2026-01-31 09:16:19] iteration        1/     100 | consumed samples:            8 | elapsed time per iteration
    (ms): 176.4 | learning rate: 3.000000E-05 | global batch size:     8 | lm loss: 1.254514E+01 | loss scale: 1.0 |
    grad norm: 32.962 | number of skipped iterations:   0 | number of nan iterations:   0 |

(one line in the log). They print a NaN as NAN, except that a loss is then missing.
"""

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tp_invariant_recipes.ledger.bits import bits_float, rounded_to_f32
from tp_invariant_recipes.ledger.lines import KIND, StepRecord
from tp_invariant_recipes.ledger.open import beginning
from tp_invariant_recipes.ledger.reader import CERTIFICATE_START, PROGRESS_EVERY, Ledger, Progress, contents

_ITERATION = re.compile(r"\biteration +(\d+)/ *\d+ +\|(.*)")  # after any prefix with a rank, a host or a time
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_FIELD = re.compile(r"\s*(\S.*?)\s*:\s*(\S+)\s*")
_NUMBER = re.compile(r"[-+]?(\d+)(?:\.(\d*))?([eE][-+]?\d+)?")
# Measurements of the machine, not results.
_MEASURED = re.compile(r"elapsed|throughput|flop|per second|per gpu|/s\b|energy|power|memory|\btime\b", re.IGNORECASE)

SAMPLES, LOSS, NORM, RATE = "consumed samples", "lm loss", "grad norm", "learning rate"


@dataclass(frozen=True)
class Log:
    """The iterations that a log prints.

    iterations: number -> field -> text. None: unknown, in the log that a ledger would have printed. After a restart of
                the training, the later lines of an iteration count.
    restarts:   (last iteration before the restart, first iteration after it)
    broken:     iteration lines without the expected end; they are left out.
    """

    path: Path
    iterations: dict[int, dict[str, str | None]]
    restarts: tuple[tuple[int, int], ...] = ()
    broken: int = 0

    @property
    def fields(self) -> list[str]:
        """The fields of all lines, in the order of printing."""
        return list(dict.fromkeys(name for line in self.iterations.values() for name in line))

    def formatted(self, name: str) -> str | None:
        """The print format of a field, such as ".6E", ".3f" or "d". None: it is never a number."""
        texts = (line.get(name) for line in self.iterations.values())
        return next((form for text in texts if text and (form := _format(text))), None)

    @property
    def interval(self) -> int:
        """The number of iterations per line; losses are means over them."""
        numbers = [0, *self.iterations]
        return min((after - before for before, after in itertools.pairwise(numbers)), default=1)


def read_log(path: Path) -> Log | None:
    """The log in a file. None: the path is a directory or a ledger, or no line shows an iteration.

    LedgerError: the file cannot be read.
    """
    if os.path.isdir(path):
        return None
    start = (beginning(path) or b"").partition(b"\n")[0]
    if start.startswith(CERTIFICATE_START) or (start.startswith(b"{") and KIND.encode() in start):
        return None
    log = parse_log(path, contents(path).decode(errors="replace"))
    return log if log.iterations or log.broken else None


def parse_log(path: Path, text: str) -> Log:
    """The iterations of a log's text; `path` names it."""
    iterations: dict[int, dict[str, str | None]] = {}
    restarts = []
    broken = 0
    for number, rest in _lines(text):
        if not rest.endswith("|"):
            broken += 1
            continue
        last = next(reversed(iterations), 0)
        if number <= last:
            restarts.append((last, number))
            iterations = {before: line for before, line in iterations.items() if before < number}
        iterations[number] = dict(_fields(rest))
    return Log(path, iterations, tuple(restarts), broken)


def printed_ledger(ledger: Ledger, log: Log, progress: Progress | None = None) -> Log:
    """The log that the ledger's iterations would have given, in the format of `log`.

    Some values are unknown (None): means over several steps, the values that a skipped step prints, and the learning
    rate of the last step, since a log prints the learning rate of the next step.
    progress: told (steps read, steps of the ledger) now and then.
    """
    forms = {name: form for name in (SAMPLES, LOSS, NORM, RATE) if (form := log.formatted(name))}
    single = log.interval == 1
    printed = {}
    for record, after in _followed(ledger):
        if record.step in log.iterations:
            printed[record.step] = {name: _print(name, form, record, after, single) for name, form in forms.items()}
        if progress and record.step % PROGRESS_EVERY == 0:
            progress(record.step, len(ledger.steps))
    return Log(ledger.path, printed)


def _followed(ledger: Ledger) -> Iterator[tuple[StepRecord, StepRecord | None]]:
    """Each step and the next one; None: it is the last."""
    before = None
    for record in ledger.steps:
        if before is not None:
            yield before, record
        before = record
    if before is not None:
        yield before, None


def digits(text: str) -> int:
    """The number of digits in a text. Leading zeros count only beside an exponent, and 0.000 has one digit."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return 1
    written = match[1] + (match[2] or "")
    return len(written) if match[3] else max(1, len(written.lstrip("0")))


def is_count(text: str) -> bool:
    """Whether a text is an integer, and so exact."""
    return _format(text) == "d"


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for line in text.splitlines():
        if match := _ITERATION.search(_COLOUR.sub("", line)):
            yield int(match[1]), match[2].strip()


def _fields(rest: str) -> Iterator[tuple[str, str]]:
    for part in rest.split("|"):
        match = _FIELD.fullmatch(part)
        if match and not _MEASURED.search(match[1]):
            yield match[1], match[2]


def _format(text: str) -> str | None:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    if match[3]:
        return f".{len(match[2] or '')}{match[3][0]}"
    return "d" if match[2] is None else f".{len(match[2])}f"


def _print(name: str, form: str, record: StepRecord, after: StepRecord | None, single: bool) -> str | None:
    """One field of a line. "": the line omits it. None: unknown."""
    if name == SAMPLES:
        return str(record.samples)
    if name == LOSS:
        return _number(record.loss, form, or_nothing=True) if single and not record.skipped else None
    if name == NORM:
        return _number(record.grad_norm, form)
    # Bridge takes the largest learning rate of the model-parallel ranks, in fp32, and prints that.
    return _number(after.learning_rate, form, in_f32=True) if after else None


def _number(bits: str | None, form: str, or_nothing: bool = False, in_f32: bool = False) -> str | None:
    if bits is None:
        return None
    value = bits_float(bits)
    if or_nothing and not value >= 0:  # Megatron prints a loss only if it is at least 0, so never a NaN
        return ""
    return format(rounded_to_f32(value) if in_f32 else value, form)
