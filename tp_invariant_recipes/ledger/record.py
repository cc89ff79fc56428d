# SPDX-License-Identifier: Apache-2.0
"""Write the file `ledger.jsonl` of a run directory during training: the header, then one line per step."""

import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tp_invariant_recipes.errors import LedgerError, RunError
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.ledger.lines import encode_header, encode_step
from tp_invariant_recipes.ledger.reader import Ledger, contents, ledger_file
from tp_invariant_recipes.ledger.schema import (
    VALIDATION,
    Header,
    StepRecord,
    fingerprint_differences,
    informative_differences,
)
from tp_invariant_recipes.ledger.stream import opened

# The interface to record a run and read it back.
__all__ = ["Header", "Ledger", "LedgerWriter", "StepRecord", "ledger_file", "put_aside", "resume"]

_RESUMED = "resumed"  # the header's note that lists changes at each resume


class LedgerWriter:
    """Appends to bitwise identical ledgers: `LedgerWriter(path).create(header)` starts it, `resume` continues it."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = ledger_file(path)
        self.last_step = 0
        self.header: Header
        self.last: StepRecord | None = None  # the last line's
        self._descriptor: int | None = None

    def __enter__(self) -> "LedgerWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create(self, header: Header) -> "LedgerWriter":
        """Start the ledger. LedgerError: a ledger exists already. RunError: it cannot be written."""
        try:
            self._open(os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            message = f"{self.path} exists already; resume that run or choose another run directory"
            raise LedgerError(message) from None
        except OSError as error:
            raise _not_written(self.path, error) from error
        self.header = header
        try:
            self._write(encode_header(header))
        except RunError:
            self.path.unlink(missing_ok=True)  # a partial header would prevent both resume and create
            raise
        return self

    def append(self, record: StepRecord) -> None:
        """Append the line of the next step in one write. ValueError: it is another step.

        RunError: it could not be written (a full disk), or the file is gone. Half of it may be there, so the writer
        accepts no more.
        """
        if record.step != self.last_step + 1:
            raise ValueError(f"{self.path}: step {record.step} cannot follow step {self.last_step}")
        self._write(encode_step(record, self.header))
        self.last_step, self.last = record.step, record

    def add(self, evaluations: Mapping[str, str]) -> None:
        """Add evaluations to the last step's line, if there is one.

        One write changes nothing before the line's end, so a killed run leaves a whole line.
        RunError: as for `append`, or another process has changed the line.
        """
        if self.last is None:
            return
        longer = replace(self.last, evaluations={**self.last.evaluations, **evaluations})
        before, after = (encode_step(record, self.header) for record in (self.last, longer))
        try:
            with self.path.open("r+b", buffering=0) as file:
                start = file.seek(-len(before), os.SEEK_END)
                if file.read() != before:
                    raise RunError(f"{self.path}: the last line is not the one that this run has written")
                file.seek(start)
                self._write(after, file.fileno())
        except OSError as error:
            raise _not_written(self.path, error) from error
        self.last = longer

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self, flags: int = 0) -> None:
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | flags, 0o644)

    def _write(self, line: bytes, descriptor: int | None = None) -> None:
        if self._descriptor is None:
            raise RunError(f"{self.path} is not open for writing")
        try:
            written = os.write(self._descriptor if descriptor is None else descriptor, line)
        except OSError as error:
            self.close()
            raise _not_written(self.path, error) from error
        if written != len(line):
            self.close()
            raise RunError(f"cannot write {self.path}: only part of a line fitted; is the disk full?")
        if not (self.path.exists() and os.path.samestat(os.fstat(self._descriptor), self.path.stat())):
            self.close()
            raise RunError(
                f"{self.path} was deleted, moved or replaced while this run writes it, so its lines are lost"
            )


def resume(path: str | os.PathLike, header: Header, step: int) -> LedgerWriter:
    """Open an existing ledger to continue after `step` completed steps (0: from the start), and return its writer.

    If that drops lines (repeated steps, a torn line), it first copies the whole old file to `ledger.replaced-K.jsonl`.
    The old header stays. If the run continues with another layout, other versions and so on, the header's note
    "resumed" gives the step of the change. If nothing changed, the file becomes byte for byte equal to an uninterrupted
    run's.
    LedgerError: the ledger is invalid, has another identity (names the fields), or ends before `step`.
    RunError: it cannot be written.
    """
    file = ledger_file(path)
    before = contents(file)
    ledger = opened(file)
    for _ in ledger.steps:
        pass  # each is checked when it is read; all of them may be too many for memory
    differences = fingerprint_differences(ledger.header, header)
    if differences:
        fields = "; ".join(f"{d.field} is {d.a or 'not set'} there and {d.b or 'not set'} now" for d in differences)
        raise LedgerError(f"{file} belongs to another run: {fields}. Change these back or choose another run directory")
    if step and ledger.header.parameters != header.parameters:
        raise LedgerError(
            f"{file} has digests of {len(ledger.header.parameters)} parameters, and this run would record "
            f"{len(header.parameters)}, or others: continue with the ledger.digests, ledger.experts and layers that it "
            f"began with"
        )
    if not 0 <= step <= len(ledger.steps):
        raise LedgerError(f"{file} ends at step {len(ledger.steps)} and cannot go on after step {step}")
    first, *steps = before.split(b"\n")[: step + 1]
    continued = _continued(ledger.header, header, step)
    if continued != ledger.header:
        first = encode_header(continued).rstrip(b"\n")
    writer = LedgerWriter(file)
    if step:
        last = ledger.steps[step - 1]
        # An uninterrupted run has the others after its own last step alone.
        kept = {name: loss for name, loss in last.evaluations.items() if name.startswith(f"{VALIDATION}/")}
        writer.last = replace(last, evaluations=kept)
        if kept != last.evaluations:
            steps[-1] = encode_step(writer.last, ledger.header).rstrip(b"\n")
    after = b"".join(line + b"\n" for line in (first, *steps))
    writer.header = continued
    try:
        if after != before:
            put_aside(file, before)
            write_atomically(file, after)
        writer._open()
    except OSError as error:
        raise _not_written(file, error) from error
    writer.last_step = step
    return writer


def _continued(old: Header, new: Header, step: int) -> Header:
    """Return the header of a ledger with steps of `old` up to `step` and then of `new`; a note says what changed."""
    if step == 0:
        return new
    notes = dict(old.notes)
    resumed = [entry for entry in notes.pop(_RESUMED, []) if entry["after_step"] < step]
    differences = informative_differences(replace(old, notes=notes), new)
    changed = {d.field: None if d.b is None else json.loads(d.b) for d in differences}
    # Compare with the latest note, since a return to the initial values is a change, too.
    if changed != (resumed[-1]["changed"] if resumed else {}):
        resumed.append({"after_step": step, "changed": changed})
    return replace(old, notes=notes | ({_RESUMED: resumed} if resumed else {}))


def put_aside(file: Path, data: bytes) -> None:
    """Save `data` of a ledger as `<stem>.replaced-K<suffix>` beside it, where K is the first free number."""
    for k in itertools.count(1):
        try:
            with file.with_name(f"{file.stem}.replaced-{k}{file.suffix}").open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
        except FileExistsError:
            continue
        return


def _not_written(file: Path, error: OSError) -> RunError:
    return RunError(f"cannot write {file}: {error.strerror or error}")
