# SPDX-License-Identifier: Apache-2.0
"""Read and check ledgers, also those that are too long for memory: each step is decoded when its turn comes.

opened(file)            reads the header, and where every line ends; the steps stay in the file
parse(file, data)       the same of bytes in memory, with all steps
abreast((a, b, …))      step 1 of all, then step 2 of all, … in one pass
"""

import io
import itertools
import os
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, overload

from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.ledger.bits import bits_float
from tp_invariant_recipes.ledger.lines import decode_header, decode_step
from tp_invariant_recipes.ledger.reader import LARGEST, PROGRESS_EVERY, Ledger, Progress, reading
from tp_invariant_recipes.ledger.schema import KIND, Header, StepRecord
from tp_invariant_recipes.reading import LONGEST_LINE, MIB, Count, Record, checked, open_file, parse_json, parse_object

_START = re.compile(rb'\s*\{\s*"kind"\s*:\s*"' + KIND.encode() + rb'"')
_BLOCK = 1 << 16


@dataclass(frozen=True)
class _Bits(Record):
    bits: str


@dataclass(frozen=True)
class _Step(Record):
    step: Count
    loss: _Bits | None


class LastStep(NamedTuple):
    """The last whole step. step: its number; 0: there is none yet. loss: its bits; None: a skipped step has none."""

    step: int
    loss: str | None


def last_step(file: Path) -> LastStep:
    """Return the last whole step of a ledger's file. OSError: it cannot be read. ValueError: it is not a ledger."""
    with open_file(file) as stream:
        if not _START.match(stream.read(256)):
            raise ValueError("not a ledger, or only part of its header" if os.path.getsize(file) else "empty file")
        size = stream.seek(0, os.SEEK_END)
        start, lines = size, [b""]
        while start and len(lines) < 4:  # part of a line, two whole ones, and what comes after them
            if size - start > 3 * LONGEST_LINE:
                raise ValueError(f"a line of more than {LONGEST_LINE} bytes")
            start = stream.seek(max(0, size - max(_BLOCK, 4 * (size - start))))
            lines = stream.read(size - start).split(b"\n")
    if len(lines) == 1:
        raise ValueError("only part of its header")
    # A killed run can leave a line that ends in another one's middle: then the one before it counts.
    for line in lines[-2:0:-1][:2]:
        try:
            raw = parse_json(line)
        except ValueError:
            continue
        step = checked(_Step, raw)
        if step.loss is None:
            return LastStep(step.step, None)
        bits_float(step.loss.bits)
        return LastStep(step.step, step.loss.bits)
    if len(lines) > 3:
        raise ValueError("its last two lines are damaged")
    return LastStep(0, None)


@dataclass(frozen=True)
class StepsInFile(Sequence[StepRecord]):
    """The steps of a ledger's file. It holds the places of the lines, and no step; a line is checked when decoded.

    ends: the place after each line's newline, the header's first. open: the file, or its bytes.
    LedgerError, naming file and line: it is invalid, or the file is no longer the one that was opened.
    """

    file: Path
    header: Header
    ends: Sequence[int]
    open: Callable[[], BinaryIO]

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __iter__(self) -> Iterator[StepRecord]:
        return (self.decode(line, step) for step, line in enumerate(self.lines(), start=1))

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[StepRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | tuple[StepRecord, ...]:
        at = range(len(self))[index]
        with self.open() as stream:
            if isinstance(at, range):
                return tuple(self.decode(self._line(stream, n + 1), n + 1) for n in at)
            return self.decode(self._line(stream, at + 1), at + 1)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of all steps in order, each read once, without their newlines."""
        with self.open() as stream:
            for step in range(1, len(self) + 1):
                yield self._line(stream, step)

    def decode(self, line: bytes, step: int) -> StepRecord:
        """Return the record of the line of a step."""
        try:
            record = decode_step(line, self.header)
            if record.step != step:
                where = "repeated or out of order" if record.step < step else "missing or out of order"
                raise ValueError(f"step {record.step} where step {step} belongs: a line is {where}")
        except ValueError as error:
            raise LedgerError(f"{self.file} line {step + 1}: {error}") from error
        return record

    def all(self, progress: Progress | None = None) -> tuple[StepRecord, ...]:
        """Return all steps, in memory. progress: told (bytes decoded, bytes in all) now and then."""
        steps = []
        for step in self:
            steps.append(step)
            if progress and step.step % PROGRESS_EVERY == 0:
                progress(self.ends[step.step], self.ends[-1])
        return tuple(steps)

    def _line(self, stream: BinaryIO, step: int) -> bytes:
        start, end = self.ends[step - 1], self.ends[step]
        with reading(self.file):
            if stream.tell() != start:
                stream.seek(start)
            line = stream.read(end - start)
        if len(line) != end - start or not line.endswith(b"\n"):
            raise _changed(self.file)
        return line[:-1]


def _changed(file: Path) -> LedgerError:
    return LedgerError(f"{file} was replaced or truncated while it was read: repeat the command")


def _reopened(file: Path, before: os.stat_result) -> BinaryIO:
    with reading(file):
        stream = open_file(file)
    if not os.path.samestat(os.fstat(stream.fileno()), before):
        stream.close()
        raise _changed(file)
    return stream


def opened(file: Path, progress: Progress | None = None) -> Ledger:
    """Return the ledger in a regular file, whose steps stay there and are checked in their turn.

    progress: told (bytes looked through, bytes in all). LedgerError: the file, its header or a line's length is bad.
    """
    with reading(file), open_file(file) as stream:
        status = os.fstat(stream.fileno())
        header, ends, torn = _lines(file, stream, status.st_size, progress)
    return Ledger(header, StepsInFile(file, header, ends, partial(_reopened, file, status)), file, torn)


def parse(file: Path, data: bytes) -> Ledger:
    """Check the bytes of a ledger with all of its steps; `file` names it in errors, as of `open.read`."""
    header, ends, torn = _lines(file, io.BytesIO(data), len(data))
    return Ledger(header, StepsInFile(file, header, ends, partial(io.BytesIO, data)).all(), file, torn)


def _lines(
    file: Path, stream: BinaryIO, total: int, progress: Progress | None = None
) -> tuple[Header, Sequence[int], bool]:
    """Return the header, the place after each whole line's newline, and whether the last line is torn."""
    ends, total = _ends(file, stream, total, progress)
    if not ends:
        what = "not a ledger, or only part of its header" if total else "empty file"
        raise LedgerError(f"{file} line 1: {what}")
    stream.seek(0)
    try:
        header = decode_header(stream.read(ends[0])[:-1])
    except ValueError as error:
        raise LedgerError(f"{file} line 1: {error}") from error
    torn = total > ends[-1]
    if not torn and len(ends) > 1:  # a node that lost power may leave zeros
        stream.seek(ends[-2])
        try:
            parse_object(stream.read(ends[-1] - ends[-2])[:-1])
        except ValueError:
            torn = True
            ends.pop()
    return header, ends, torn


def abreast(ledgers: Sequence[Ledger]) -> Iterator[tuple[StepRecord | None, ...]]:
    """Yield step n of all ledgers at once; None: one has ended. Equal lines of equal parameters are one record."""
    parameters = [ledger.header.parameters for ledger in ledgers]
    alike = [parameters.index(listed) for listed in parameters]  # the first ledger with the same parameters
    sources: list[Iterator[Any]] = [
        ledger.steps.lines() if isinstance(ledger.steps, StepsInFile) else iter(ledger.steps) for ledger in ledgers
    ]
    for step, entries in enumerate(itertools.zip_longest(*sources), start=1):
        decoded: dict[tuple[int, bytes], StepRecord] = {}
        records: list[StepRecord | None] = []
        for ledger, group, entry in zip(ledgers, alike, entries, strict=True):
            if isinstance(entry, bytes) and isinstance(ledger.steps, StepsInFile):
                if (group, entry) not in decoded:
                    decoded[group, entry] = ledger.steps.decode(entry, step)
                records.append(decoded[group, entry])
            elif not isinstance(entry, bytes):
                records.append(entry)
        yield tuple(records)


def _ends(file: Path, stream: BinaryIO, total: int, progress: Progress | None) -> tuple[array, int]:
    """Return the place after each newline, and the number of bytes, of what there is now: a run may be writing."""
    ends = array("Q")
    if total > LARGEST:
        most = f"it has more than {LARGEST} bytes, the most that a file of its kind may have"
        raise LedgerError(f"cannot read {file}: {most}")
    start = 0
    while start < total and (block := stream.read(min(MIB, total - start))):
        at = block.find(b"\n")
        while at >= 0:
            ends.append(start + at + 1)
            at = block.find(b"\n", at + 1)
            if ends[-1] - (ends[-2] if len(ends) > 1 else 0) > LONGEST_LINE:
                raise LedgerError(f"{file} line {len(ends)}: more than {LONGEST_LINE} bytes")
        start += len(block)
        if start - (ends[-1] if ends else 0) > LONGEST_LINE:
            raise LedgerError(f"{file} line {len(ends) + 1}: more than {LONGEST_LINE} bytes")
        if progress:
            progress(start, total)
    return ends, start
