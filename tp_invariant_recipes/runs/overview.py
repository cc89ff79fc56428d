"""Every run below a folder: how far it is, and which runs are comparable. It reads `run.json` and the ledger's end.

A directory that is damaged is a row with the reason. Thousands of runs take seconds.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import chain, count, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.ledger.bits import described
from tp_invariant_recipes.ledger.run_files import Attempt
from tp_invariant_recipes.ledger.tail import last_step
from tp_invariant_recipes.reading import Hash, Layout, Listed, Record
from tp_invariant_recipes.runs import lock
from tp_invariant_recipes.runs.matrix_dir import MatrixDir
from tp_invariant_recipes.runs.run_dir import RunDir

# The states of a run; those of `outcome` in run.json, and:
RUNNING, COMPLETED, STOPPED, FAILED = "running", "completed", "stopped", "failed"
KILLED = "killed"  # its last attempt recorded no exit status, and nobody trains there
WAITING = "not started"  # submitted
DAMAGED = "damaged"

# Commands that make runs for themselves, each in a folder of their directory.
MAKERS = ("verify", "bench", "bisect", "audit")

RESUMABLE = (STOPPED, FAILED, KILLED)
_OF_A_RUN = {file.name for file in (RunDir(Path()).run, RunDir(Path()).config, RunDir(Path()).ledger)}
_DEGREES = ("tp", "pp", "dp", "cp", "ep", "etp")


@dataclass(frozen=True, kw_only=True)
class ListedRun(Record):
    """`run.json`, as far as a list shows it."""

    model: str
    identity_hash: Hash
    layout: Layout
    device: str | None = None
    numerics: dict[str, Any] = field(default_factory=dict)
    attempts: Listed[Attempt]


@dataclass(frozen=True)
class RunRow:
    """One run.

    state:   one of the words above. why: the reason of a failure or of damage; None otherwise.
    step:    the last in its ledger; None: the ledger cannot be read. planned: the last one planned; None: not known.
    loss:    its bits, at that step; None: there is none.
    began:   when its last attempt began, as run.json has it; "" without one.
    command: of its last attempt; "" without one.
    own:     whether a command of `MAKERS` made it for itself.
    """

    run: Path
    state: str
    why: str | None = None
    step: int | None = None
    planned: int | None = None
    loss: str | None = None
    model: str | None = None
    numerics: str | None = None
    device: str | None = None
    layout: dict[str, Any] | None = None
    identity_hash: str | None = None
    began: str = ""
    command: str = ""
    own: bool = False

    @property
    def when(self) -> float:
        """The time in seconds since 1970, whatever the time zones of hosts; 0 without one."""
        try:
            return datetime.fromisoformat(self.began).timestamp()
        except (ValueError, OverflowError, OSError):
            return 0.0

    @property
    def degrees(self) -> str:
        """The layout in a few words: degrees above 1, and tp."""
        at = self.layout or {}
        return " ".join(f"{name}={at[name]}" for name in _DEGREES if at.get(name, 1) != 1 or (name == "tp" and at))

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON; documented in docs/running.md."""
        fields = asdict(self) | {"run": str(self.run), "loss": described(self.loss), "began": self.began or None}
        del fields["command"]
        return {"of" if name == "planned" else name: value for name, value in fields.items()}


def rows(folder: Path) -> list[RunRow]:
    """All runs below a folder, or its own, by when their last attempt began. RunError: there is no such folder."""
    if not folder.is_dir():
        raise RunError(f"{folder}: there is no such folder")
    return sorted(map(row, _directories(folder)), key=lambda row: (row.when, str(row.run)))


def row(run: Path | tuple[Path, str]) -> RunRow:
    """Return the row of a run directory, or of a folder that cannot be looked into, with the reason."""
    if isinstance(run, tuple):
        return RunRow(run[0], DAMAGED, run[1])
    run_dir = RunDir(run)
    own = MatrixDir(run.parent).matrix.exists()
    try:
        record = run_dir.read_run(ListedRun)
    except RunError as error:
        return RunRow(run, DAMAGED, _damage(run_dir, error), own=own)
    last = record.attempts[-1] if record.attempts else Attempt()
    state, why = _state(run_dir, last if record.attempts else None)
    step: int | None = 0
    loss = None
    try:
        step, loss = last_step(run_dir.ledger)
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError) or state == COMPLETED:
            reason = "it is missing" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", None)
            state, why, step = DAMAGED, f"{run_dir.ledger.name}: {reason or error}", None
    return RunRow(
        run,
        state,
        why,
        step,
        last.to_step,
        loss,
        record.model,
        str(record.numerics.get("mode", "")) or None,
        record.device,
        record.layout,
        record.identity_hash,
        last.time,
        last.command,
        own or last.command.startswith(tuple(f"tpi {maker} " for maker in MAKERS)),
    )


def groups(listed: Iterable[RunRow]) -> dict[str, str]:
    """Identity hash -> a short name, for the identities that several runs have: these runs are comparable."""
    times = Counter(run.identity_hash for run in listed if run.identity_hash)
    shared = [identity for identity, runs in times.items() if runs > 1]
    letters = (product(ascii_lowercase, repeat=length) for length in count(1))  # a, b, … z, aa, ab …
    return dict(zip(shared, map("".join, chain.from_iterable(letters)), strict=False))


def comparable(run: Path) -> Path | None:
    """Return the latest other run in the folder of this one with its identity; None: there is none."""
    mine = row(run)
    siblings = []
    with suppress(OSError):
        siblings = [path for path in _entries(run.absolute().parent) if path.name != run.absolute().name]
    near = [other for other in map(row, siblings) if other.step]
    same = [other for other in near if other.identity_hash == mine.identity_hash]
    newest = max(same, key=lambda other: other.when, default=None)
    return None if newest is None else run.parent / newest.run.name


def latest_to_resume(folder: Path, iters: int | None = None) -> RunRow:
    """Return the run of `tpi train` below a folder whose last attempt began latest, of those that can go on.

    A completed run can where `iters` asks for more steps than it has. Raises RunError when there is none.
    """
    if not folder.is_dir():
        raise RunError(
            f"--resume last looks for runs below {folder}, and there is no such folder; name one: --resume RUN"
        )
    # Other commands make runs of their own, and continue none.
    trained = [run for run in rows(folder) if run.command.split()[:2] == ["tpi", "train"]]
    able = [run for run in trained if _goes_on(run, iters)]
    if able:
        return able[-1]
    states = Counter(run.state for run in trained)
    there = ", ".join(f"{count} {state}" for state, count in states.items())
    raise RunError(
        f"--resume last: no run of tpi train below {folder} can go on ({there or 'there is none'}); "
        "tpi runs lists all; of a completed run, iters=N above its steps asks for more"
    )


def _goes_on(run: RunRow, iters: int | None) -> bool:
    longer = run.state == COMPLETED and iters is not None and run.step is not None and iters > run.step
    return run.state in RESUMABLE or longer


def _damage(run_dir: RunDir, error: RunError) -> str:
    try:
        if not run_dir.run.is_file():
            return "run.json is not a file" if run_dir.run.exists() else "run.json is missing"
    except OSError as denied:  # of the folder: no permission to look into it
        return f"cannot be read: {denied.strerror or denied}"
    return str(error).removeprefix(f"{run_dir.path} is not a run directory: ")


def _state(run_dir: RunDir, last: Attempt | None) -> tuple[str, str | None]:
    if lock.holder(run_dir) is not None:
        return RUNNING, None
    if last is None:
        return WAITING, None
    if last.outcome is None and run_dir.disk_full.exists():
        return FAILED, "disk full"
    if last.outcome not in (COMPLETED, STOPPED, FAILED):
        return KILLED, None
    return last.outcome, last.why


def _directories(folder: Path) -> Iterator[Path | tuple[Path, str]]:
    """Run directories below a folder. None lies in another one. A folder that cannot be read comes with the reason."""
    waiting, seen = [folder], set()
    while waiting:
        path = waiting.pop()
        try:
            status = path.stat()
            if (status.st_dev, status.st_ino) in seen:  # through a link
                continue
            seen.add((status.st_dev, status.st_ino))
            if not _OF_A_RUN.isdisjoint(os.listdir(path)):  # it is a run directory, or was meant to be one
                yield path
            elif not (path / "passes.json").exists():  # of a benchmark: ledgers of turns, which are no runs
                waiting += [entry for entry in _entries(path) if not entry.name.startswith(".")]
        except OSError as error:
            yield path, f"cannot be read: {error.strerror or error}"


def _entries(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return [folder / entry.name for entry in entries if entry.is_dir()]
