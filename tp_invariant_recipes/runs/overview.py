# SPDX-License-Identifier: Apache-2.0
"""Every run below a folder: how far it is, which runs are comparable, and where one has left things.

It reads `run.json` and the ledger's end.

A directory that is damaged is a row with the reason. Thousands of runs take seconds.
"""

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tp_invariant_recipes.errors import RunError, reason
from tp_invariant_recipes.ledger.bits import described
from tp_invariant_recipes.ledger.run_files import Restart
from tp_invariant_recipes.ledger.stream import last_step
from tp_invariant_recipes.reading import Hash, Layout, Listed, Record
from tp_invariant_recipes.runs import lock
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.runs.sweep_dir import SweepDir

# The states of a run; those of `outcome` in run.json, and:
RUNNING, COMPLETED, STOPPED, FAILED = "running", "completed", "stopped", "failed"
KILLED = "killed"  # its last restart recorded no exit status, and nobody trains there
WAITING = "not started"  # submitted
DAMAGED = "damaged"

# Commands that make runs for themselves, each in a folder of their directory.
MAKERS = ("verify", "bench", "bisect", "audit")

_OF_A_RUN = {file.name for file in (RunDir(Path()).run, RunDir(Path()).config, RunDir(Path()).ledger)}


@dataclass(frozen=True, kw_only=True)
class ListedRun(Record):
    """`run.json`, as far as a list shows it."""

    model: str
    identity_hash: Hash
    layout: Layout
    device: str | None = None
    numerics: dict[str, Any] = field(default_factory=dict)
    attempts: Listed[Restart]


@dataclass(frozen=True)
class RunRow:
    """One run.

    state:  one of the words above. why: the reason of a failure or of damage; None otherwise.
    step:   the last in its ledger; None: the ledger cannot be read. loss: its bits, at that step; None: there is none.
    record: its `run.json`; None: it cannot be read. own: whether a command of `MAKERS` made it for itself.
    """

    run: Path
    state: str
    why: str | None = None
    step: int | None = None
    loss: str | None = None
    record: ListedRun | None = None
    own: bool = False

    @property
    def last(self) -> Restart:
        """Its last restart; an empty one without any."""
        return self.record.attempts[-1] if self.record and self.record.attempts else Restart()

    @property
    def when(self) -> float:
        """When its last restart began, in seconds since 1970, whatever the time zones of hosts; 0 without one."""
        try:
            return datetime.fromisoformat(self.last.time).timestamp()
        except (ValueError, OverflowError, OSError):
            return 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON; documented in docs/running.md."""
        known = vars(self.record) if self.record else {}
        return {
            "run": str(self.run),
            "state": self.state,
            "why": self.why,
            "step": self.step,
            "of": self.last.to_step,
            "loss": described(self.loss),
            "numerics": str(known.get("numerics", {}).get("mode", "")) or None,
            **{name: known.get(name) for name in ("model", "device", "layout", "identity_hash")},
            "began": self.last.time or None,
            "own": self.own,
        }


def rows(folder: Path) -> list[RunRow]:
    """All runs below a folder, or its own, by when their last restart began. RunError: there is no such folder."""
    if not folder.is_dir():
        raise RunError(f"{folder}: there is no such folder")
    return sorted(_below(folder), key=lambda row: (row.when, str(row.run)))


def row(run: Path) -> RunRow:
    """Return the row of a run directory."""
    run_dir, own = RunDir(run), SweepDir(run.parent).matrix.exists()
    try:
        record = run_dir.read_run(ListedRun)
    except RunError as error:
        return RunRow(run, DAMAGED, str(error).removeprefix(f"{run} is not a run directory: "), own=own)
    state, why = _state(run_dir, record.attempts[-1] if record.attempts else None)
    step: int | None = 0
    loss = None
    try:
        step, loss = last_step(run_dir.ledger)
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError) or state == COMPLETED:
            state, why, step = DAMAGED, f"{run_dir.ledger.name}: {reason(error)}", None
    row = RunRow(run, state, why, step, loss, record, own)
    return replace(row, own=own or row.last.command.startswith(tuple(f"tpi {maker} " for maker in MAKERS)))


def _state(run_dir: RunDir, last: Restart | None) -> tuple[str, str | None]:
    if lock.holder(run_dir) is not None:
        return RUNNING, None
    if last is None:
        return WAITING, None
    if last.outcome is None and run_dir.disk_full.exists():
        return FAILED, "disk full"
    if last.outcome not in (COMPLETED, STOPPED, FAILED):
        return KILLED, None
    return last.outcome, last.why


def _below(folder: Path) -> Iterator[RunRow]:
    """Yield the rows of the run directories below a folder, of which none lies in another one, and of folders that
    cannot be read."""
    waiting, seen = [folder], set()
    while waiting:
        path = waiting.pop()
        try:
            status = path.stat()
            if (status.st_dev, status.st_ino) in seen:  # through a link
                continue
            seen.add((status.st_dev, status.st_ino))
            entries = [*os.scandir(path)]
            if not _OF_A_RUN.isdisjoint(entry.name for entry in entries):  # or it was meant to be a run directory
                yield row(path)
            else:
                waiting += [path / entry.name for entry in entries if entry.is_dir() and entry.name[0] != "."]
        except OSError as error:
            yield RunRow(path, DAMAGED, f"cannot be read: {error.strerror or error}")


# Folder of a run -> files of which it has one, and the command that shows or uploads its curves.
_CURVES = {
    "tensorboard": ("", "tensorboard --logdir {}"),
    "wandb": ("/offline-run-*", "wandb sync --append {}"),  # the restarts at a run are one run of wandb
    "mlflow": ("", "MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {}"),  # it shows no files without
    "comet": ("/*.zip", "comet upload {}"),
}


def places(run_dir: RunDir) -> dict[str, str | None]:
    """Return where a run has left its ledger, and the commands that show or upload its curves; None: it has none."""
    found: dict[str, str | None] = {"ledger": str(run_dir.ledger) if run_dir.ledger.exists() else None}
    for name, (files, command) in _CURVES.items():
        there = any(run_dir.path.glob(f"{name}{files}"))
        found[name] = command.format(f"{shlex.quote(str(run_dir.path / name))}{files}") if there else None
    return found


def place_lines(run_dir: RunDir) -> list[str]:
    """Return the places as lines of text, and what to do next."""
    run, found = shlex.quote(str(run_dir.path)), places(run_dir)
    lines = [f"ledger: {ledger}"] if (ledger := found.pop("ledger")) else []
    lines += [command for command in found.values() if command]
    return [*lines, f"next: tpi compare {run} RUN_B   tpi report {run}"] if ledger else lines
