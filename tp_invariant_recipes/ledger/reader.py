# SPDX-License-Identifier: Apache-2.0
"""Read and check the file `ledger.jsonl` of a run directory."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tp_invariant_recipes.errors import LedgerError, reason
from tp_invariant_recipes.ledger.lines import decode_header, decode_step
from tp_invariant_recipes.ledger.schema import Header, StepRecord
from tp_invariant_recipes.reading import parse_object, read_limited

FILE_NAME = "ledger.jsonl"
LARGEST = 16 << 30  # bytes: 10,000 steps of 22,000 parameters
PROGRESS_EVERY = 64  # lines
Progress = Callable[[int, int], None]
CERTIFICATE_START = b"PK\x03\x04"  # a certificate is a zip archive; a ledger begins with a brace


@dataclass(frozen=True)
class Ledger:
    """A ledger read from disk; `steps[i]` is step i + 1, a tuple or a `stream.StepsInFile`."""

    header: Header
    steps: Sequence[StepRecord]
    path: Path
    torn: bool  # the end of the run cut the last line short; `steps` does not include it

    @property
    def run_directory(self) -> Path | None:
        """The directory of the run. None: the ledger is a separate file, or in a certificate."""
        return self.path.parent if self.path.name == FILE_NAME else None


def same_file(a: Path, b: Path) -> bool:
    """Whether two paths name one file, also by links."""
    try:
        return os.path.samefile(a, b)
    except OSError:
        return a.resolve() == b.resolve()


def ledger_file(path: str | os.PathLike) -> Path:
    """Return the ledger's file in a run directory; a path that is not a directory is itself the ledger."""
    path = Path(path)
    return path / FILE_NAME if os.path.isdir(path) else path  # Path.is_dir raises for a name that is too long


def contents(file: Path, limit: int = LARGEST) -> bytes:
    """Return the bytes of a file. LedgerError: it does not exist, cannot be read or has more than `limit` bytes."""
    with reading(file):
        return read_limited(file, limit)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Read a file in the block, which raises LedgerError for an OSError or ValueError."""
    try:
        yield
    except FileNotFoundError:
        raise LedgerError(f"{file} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: it is too large, or its name has a zero byte
        raise LedgerError(f"cannot read {file}: {reason(error)}") from error


def parse(file: Path, data: bytes, *, progress: Progress | None = None) -> Ledger:
    """Check the bytes of a ledger; `file` names it in errors, as of `open.read`. progress: told (bytes, all bytes)."""
    *lines, rest = data.split(b"\n")  # `rest` follows the last newline: it is empty, or a torn line
    if not lines:
        raise no_header(file, empty=not rest)
    torn = rest != b""
    if not torn and len(lines) > 1 and not is_whole(lines[-1]):
        torn = True
        lines.pop()
    steps = []
    number = 1
    try:
        header = decode_header(lines[0])
        done = 0
        for number, line in enumerate(lines[1:], start=2):
            steps.append(next_step(line, header, number - 1))
            done += len(line) + 1
            if progress and number % PROGRESS_EVERY == 0:
                progress(done, len(data))
    except ValueError as error:
        raise LedgerError(f"{file} line {number}: {error}") from error
    return Ledger(header, tuple(steps), file, torn)


def no_header(file: Path, *, empty: bool) -> LedgerError:
    """Return the error of a file without a whole first line."""
    return LedgerError(f"{file} line 1: " + ("empty file" if empty else "not a ledger, or only part of its header"))


def is_whole(line: bytes) -> bool:
    """Whether a last line is one; a node that lost power may leave zeros."""
    try:
        parse_object(line)
    except ValueError:
        return False
    return True


def next_step(line: bytes, header: Header, expected: int) -> StepRecord:
    """Return the record of step `expected`. ValueError: the line is invalid, or of another step."""
    record = decode_step(line, header)
    if record.step != expected:
        where = "repeated or out of order" if record.step < expected else "missing or out of order"
        raise ValueError(f"step {record.step} where step {expected} belongs: a line is {where}")
    return record
