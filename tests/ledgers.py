# SPDX-License-Identifier: Apache-2.0
"""Ledgers made by hand, and the lines of ledgers, to be compared byte by byte."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tp_invariant_recipes.ledger.record import Header, LedgerWriter, StepRecord

STATE = {"clipped", "masters", "moments"}


def record(step: int, **changes: Any) -> StepRecord:
    """A step that is as any other, but for the changes."""
    values = dict(step=step, samples=step, tokens=64, loss="f32:40c80000", grad_norm="f32:3fa00000")
    return StepRecord(**values | dict(learning_rate="f64:3f33a92a30553261") | changes)


def write(where: Path, header: Header, records: Iterable[StepRecord]) -> None:
    """Write the ledger of a run directory, or a file of one."""
    with LedgerWriter(where).create(header) as ledger:
        for step in records:
            ledger.append(step)


def steps(run: Path) -> list[bytes]:
    """The lines of all steps of a run directory; none where there is no ledger yet."""
    ledger = run / "ledger.jsonl"
    return ledger.read_bytes().split(b"\n")[1:-1] if ledger.exists() else []


def agree(lines: Iterable[bytes], others: Iterable[bytes]) -> bool:
    """Whether steps agree in all that both have. A step that a signal saved has digests of STATE; in another run the
    signal came at another step."""
    pairs = [(json.loads(first), json.loads(other)) for first, other in zip(lines, others, strict=True)]
    return all(
        first.keys() ^ other.keys() <= STATE and all(first[name] == other[name] for name in first.keys() & other.keys())
        for first, other in pairs
    )
