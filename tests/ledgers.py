"""The lines of ledgers, to be compared byte by byte."""

import json
from collections.abc import Iterable
from pathlib import Path

STATE = {"clipped", "masters", "moments"}


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
