"""The last step of a ledger, without reading the rest: for lists of many runs. `reader.py` reads and checks all."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tp_invariant_recipes.ledger.bits import bits_float
from tp_invariant_recipes.ledger.schema import KIND
from tp_invariant_recipes.reading import LONGEST_LINE, Count, Record, checked, open_file, parse_json

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
        end = _newline_before(stream, os.fstat(stream.fileno()).st_size)
        if end is None:
            raise ValueError("only part of its header")
        # A killed run can leave a line that ends in another one's middle: then the one before it counts.
        for _ in range(2):
            start = _newline_before(stream, end)
            if start is None:
                return LastStep(0, None)
            stream.seek(start + 1)
            data = stream.read(end - start - 1)
            try:
                raw = parse_json(data)
            except ValueError:
                end = start
                continue
            step = checked(_Step, raw)
            if step.loss is None:
                return LastStep(step.step, None)
            bits_float(step.loss.bits)
            return LastStep(step.step, step.loss.bits)
        raise ValueError("its last two lines are damaged")


def _newline_before(stream: BinaryIO, end: int) -> int | None:
    """Return the position of the last newline before `end`. ValueError: the line after it is too long."""
    position = end
    while position > 0:
        if end - position > LONGEST_LINE:
            raise ValueError(f"a line of more than {LONGEST_LINE} bytes")
        size = min(_BLOCK, position)
        stream.seek(position - size)
        newline = stream.read(size).rfind(b"\n")
        if newline >= 0:
            return position - size + newline
        position -= size
    return None
