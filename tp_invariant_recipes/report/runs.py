# SPDX-License-Identifier: Apache-2.0
"""The runs of a report: ledgers with short names, other data of their run directories, and their comparisons."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np

from tp_invariant_recipes.comparison.compare import Comparison, compare_all
from tp_invariant_recipes.errors import LedgerError, RunError
from tp_invariant_recipes.ledger.bits import readable
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.ledger.reader import Ledger, Progress, contents
from tp_invariant_recipes.ledger.run_files import ProgressLine, RunFile
from tp_invariant_recipes.reading import checked, parse_json
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.text import plural, single_line

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Run:
    """A run of a report.

    letter:  "A" is the run that the others are compared with.
    name:    the shortest end of its path that no other run shares.
    file:    `run.json`; None: there is none, or it cannot be read.
    unread:  number of incomplete lines in `progress.jsonl`; a killed run leaves one.
    """

    letter: str
    name: str
    ledger: Ledger
    timings: tuple[ProgressLine, ...]
    file: RunFile | None
    unread: int

    @property
    def label(self) -> str:
        """Letter and name, as legends and tables show them."""
        return f"{self.letter} {self.name}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Facts about this run that a reader needs before judging a figure; one sentence each."""
        steps, sentences = len(self.ledger.steps), []
        planned = self.file.attempts[-1].to_step if self.file and self.file.attempts else None
        if planned is not None and steps < planned:
            sentences.append(f"unfinished: the ledger has {steps} of {plural(planned, 'step')}")
        if self.ledger.torn:
            sentences.append("the last line of the ledger is torn: the run was killed, or is writing it now")
        skipped = sum(step.skipped for step in self.ledger.steps)
        if skipped:
            sentences.append(f"steps skipped: {skipped}")
        diverged = [step.step for step in self.ledger.steps if step.diverged]
        if diverged:
            sentences.append(f"ranks disagree, first at step {diverged[0]}")
        if self.unread:
            sentences.append(f"incomplete lines of progress.jsonl, left out: {self.unread}")
        return tuple(sentences)

    @property
    def facts(self) -> dict[str, str]:
        """What a reader asks first: name -> text; what is not known is left out."""
        header, losses = self.ledger.header, [step.loss for step in self.ledger.steps if step.loss is not None]
        attempts = self.file.attempts if self.file else ()
        seconds = float(np.median([timing.seconds for timing in self.timings])) if self.timings else 0.0
        peak = max((timing.peak_memory for timing in self.timings), default=0)
        source = [word for word in (self.file.overrides if self.file else ()) if word.startswith("data.path=")]
        layout = " ".join(f"{name}={degree}" for name, degree in header.layout.items() if degree not in (1, False))
        hosts = dict.fromkeys(attempt.host for attempt in attempts if attempt.host)
        end = f"{attempts[-1].outcome or 'not recorded'}: {attempts[-1].why or ''}".strip(": ") if attempts else ""
        facts = {
            "model": self.file.model if self.file else "",
            "data": " ".join([str(header.identity.get("data.kind") or ""), *source]).strip(),
            "numerics": str(header.numerics.get("mode", "")),
            "layout": layout or "one rank",
            "machine": ", ".join(filter(None, (header.device.get("name"), *hosts))),
            "begun": attempts[0].time.replace("T", " ") if attempts else "",
            "starts": str(len(attempts)) if len(attempts) > 1 else "",
            "time of all steps": _duration(sum(timing.seconds for timing in self.timings)) if self.timings else "",
            "end": end,
            "steps": f"{len(self.ledger.steps):,}",
            "last loss": str(readable(losses[-1])) if losses else "none",
            "median step": f"{seconds:.3g} s" if seconds else "",
            "tokens/s": f"{self.timings[-1].tokens / seconds:,.0f}" if seconds else "",
            "peak memory": f"{peak / 2**30:.2f} GiB" if peak else "",
            "identity": header.identity_hash[:12],
            "remarks": "; ".join(self.remarks),
        }
        return {name: single_line(text) for name, text in facts.items() if text}


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


@dataclass(frozen=True)
class Report:
    """Runs, and the comparison of each later run with the first."""

    runs: tuple[Run, ...]
    comparisons: tuple[Comparison, ...]

    @property
    def pairs(self) -> tuple[tuple[Run, Comparison], ...]:
        """Every run after the first, with its comparison."""
        return tuple(zip(self.runs[1:], self.comparisons, strict=True))


def gather(
    paths: Sequence[str | os.PathLike],
    *,
    reading: Callable[[Path], Progress] | None = None,
    comparing: Progress | None = None,
) -> Report:
    """Read 1 to 26 run directories, ledgers or certificates, and compare them. LedgerError.

    reading: makes of a path what is told how far it is read. comparing: as `progress` of `compare_all`.
    """
    if not 1 <= len(paths) <= len(_LETTERS):
        raise LedgerError(f"a report covers 1 to {len(_LETTERS)} runs, not {len(paths)}: tpi report RUN…")
    ledgers = [read(path, progress=reading(Path(path)) if reading else None) for path in paths]
    first, *others = ledgers
    whole = [(ledger.run_directory or ledger.path).resolve() for ledger in ledgers]
    ends: dict[Path, str] = {}
    for path in whole:
        lengths = range(1, len(path.parts) + 1)
        distinct = (n for n in lengths if all(other.parts[-n:] != path.parts[-n:] for other in whole if other != path))
        ends[path] = "/".join(path.parts[-next(distinct, len(path.parts)) :])
    return Report(
        tuple(map(_run, _LETTERS, [single_line(ends[path]) for path in whole], ledgers)),
        compare_all(first, others, progress=comparing),
    )


def _run(letter: str, name: str, ledger: Ledger) -> Run:
    # A ledger of another name (a replaced one, a certificate) has the files of another run beside it, or none.
    if ledger.run_directory is None:
        return Run(letter, name, ledger, (), None, 0)
    run_dir, file = RunDir(ledger.run_directory), None
    with suppress(RunError):
        file = run_dir.read_run(RunFile)
    timings, unread = _timings(run_dir.progress)
    return Run(letter, name, ledger, timings, file, unread)


def _timings(file: Path) -> tuple[tuple[ProgressLine, ...], int]:
    """Return the timings by step. A step repeated after a resume counts with its last time."""
    timings, unread = {}, 0
    for line in contents(file).splitlines() if file.exists() else ():
        try:
            step = checked(ProgressLine, parse_json(line, constants=True))
        except ValueError:
            unread += 1
        else:
            timings[step.step] = step
    return tuple(timings[step] for step in sorted(timings)), unread
