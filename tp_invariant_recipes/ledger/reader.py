# SPDX-License-Identifier: Apache-2.0
"""The file `ledger.jsonl` of a run directory, and what a ledger is to a program."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tp_invariant_recipes.errors import LedgerError, reason
from tp_invariant_recipes.ledger.schema import Header, StepRecord
from tp_invariant_recipes.reading import read_limited

FILE_NAME = "ledger.jsonl"
LARGEST = 16 << 30  # bytes: 10,000 steps of 22,000 parameters
PROGRESS_EVERY = 64  # steps
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
