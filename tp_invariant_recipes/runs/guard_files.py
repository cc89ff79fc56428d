"""What a guard leaves in a run directory: the last step that it has found good, and after a fault what is not trusted.

    guard/good.json                 written by the first rank after each good shadow step
    guard/step-12-rank-1.evidence   ledger/evidence.py
    guard/untrusted-rank-1.json     beside it: checkpoints after a step are not trusted, and where the fault happened

A rank writes the last two before it ends. Whoever plans or ends an attempt then settles them: it moves the checkpoints
aside. A launcher that is killed in between leaves that to the next one.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tp_invariant_recipes.errors import CheckpointError
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.ledger.evidence import SUFFIX
from tp_invariant_recipes.reading import MIB, Count, Listed, Record, checked, parse_json, read_limited
from tp_invariant_recipes.runs import checkpoints
from tp_invariant_recipes.runs.run_dir import RunDir


@dataclass(frozen=True)
class Untrusted(Record):
    """After a fault. trusted: the last step whose checkpoint is trusted. hosts: of the suspects."""

    trusted: Count
    hosts: Listed[str] = field(default=())


@dataclass(frozen=True)
class Good(Record):
    """The last step that a guard has found good."""

    step: Count


def evidence_file(run_dir: RunDir, step: int, rank: int) -> Path:
    """Return the evidence of a rank."""
    return run_dir.guard / f"step-{step}-rank-{rank}{SUFFIX}"


def distrust(run_dir: RunDir, rank: int, untrusted: Untrusted) -> None:
    """Note, before this rank ends, which checkpoints are not trusted. Raises OSError."""
    run_dir.guard.mkdir(parents=True, exist_ok=True)
    write_atomically(run_dir.guard / f"untrusted-rank-{rank}.json", json.dumps(untrusted.as_json()))


def unsettled(run_dir: RunDir) -> Untrusted | None:
    """Return what ranks have noted since the last `settle`, together; None: nothing. CheckpointError: it is damaged."""
    try:
        notes = [checked(Untrusted, parse_json(read_limited(file, MIB))) for file in _noted(run_dir)]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{run_dir.guard}: which checkpoints are trusted cannot be read: {error}") from error
    if not notes:
        return None
    hosts = {host for note in notes for host in note.hosts}
    return Untrusted(min(note.trusted for note in notes), tuple(sorted(hosts)))


def settle(run_dir: RunDir) -> Untrusted | None:
    """Set untrusted checkpoints aside, and return what was noted. CheckpointError: it cannot be read."""
    untrusted = unsettled(run_dir)
    if untrusted is not None and run_dir.checkpoints.is_dir():
        checkpoints.set_aside(run_dir.checkpoints, after=untrusted.trusted)
    for file in _noted(run_dir):
        file.unlink()
    return untrusted


def _noted(run_dir: RunDir) -> list[Path]:
    return sorted(run_dir.guard.glob("untrusted-rank-*.json"))


def write_good(run_dir: RunDir, step: int) -> None:
    """Note a good step. Raises OSError."""
    run_dir.guard.mkdir(parents=True, exist_ok=True)
    write_atomically(run_dir.guard / "good.json", json.dumps(Good(step).as_json()))


def read_good(run_dir: RunDir, start: int) -> int:
    """Return the last step, up to the one that a run goes on from, that a guard has found good; 0: none is known."""
    with suppress(OSError, ValueError):
        good = checked(Good, parse_json(read_limited(run_dir.guard / "good.json", MIB)))
        return good.step if good.step <= start else 0
    return 0
