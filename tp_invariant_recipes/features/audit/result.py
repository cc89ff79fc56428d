# SPDX-License-Identifier: Apache-2.0
"""What an audit found, and what a campaign of audits found."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, override

from rich import box
from rich.table import Column, Table
from rich.text import Text

from tp_invariant_recipes.comparison import deviation
from tp_invariant_recipes.comparison.deviation import TensorDeviation
from tp_invariant_recipes.reading import Listed, Record
from tp_invariant_recipes.result import Result
from tp_invariant_recipes.text import plural

WITHIN, BEYOND, NOT_DECIDED, FAILED = "within rounding", "beyond rounding", "not decided", "failed"
WHOLE, DIFFERS, NOT_JUDGED = "whole", "differs", "not judged"  # of a resume
EXIT_STATUS = {WITHIN: 0, BEYOND: 1, NOT_DECIDED: 2, WHOLE: 0, DIFFERS: 1, NOT_JUDGED: 2}
_COLOURS = {WITHIN: "green", BEYOND: "red", WHOLE: "green", DIFFERS: "red"}
DITHERED = 3  # repetitions of the reference
# Kind of tensor -> its column.
_KINDS = {
    "weights": "initial",
    "forward": "output",
    "backward": "to input",
    "gradients": "gradient",
    "norm": "norm",
    "updates": "update",
    "reports": "report",
}
_ROWS = 40  # of the table on a terminal; audit.json has all
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)|(?<=rank )[0-9]+")  # of a layer or an expert, or of a rank that failed


def coloured(text: str, verdict: str) -> Text:
    """Return a line whose first word is a verdict."""
    line = Text(text)
    line.stylize(f"bold {_COLOURS.get(verdict, 'yellow')}", 0, len(verdict))
    return line


@dataclass(frozen=True)
class Judged(Result):
    """The verdict of an audit, and what led to it.

    words: the verdict in one line. known: the known fault that this is; None: it is none.
    facts: of the trainings or recordings: model, overrides, layouts, seconds; host, time and command of the audit.
    """

    directory: Path
    verdict: str
    words: str
    known: str | None
    facts: Mapping[str, Any]

    @property
    @override
    def exit_status(self) -> int:
        return EXIT_STATUS[self.verdict]

    @override
    def as_json(self) -> dict[str, Any]:
        head = {"exit_status": self.exit_status, "verdict": self.verdict, "text": self.words, "known": self.known}
        return {**head, "directory": str(self.directory), **self.facts}

    @override
    def lines(self) -> Iterator[str | Text | Table]:
        yield coloured(self.words, self.verdict)
        if self.known:
            yield f"known: {self.known}"


@dataclass(frozen=True)
class AuditResult(Judged):
    """Two trainings or recordings, judged tensor by tensor (docs/audit.md).

    omitted:     names that one of the two lacks.
    blind_spots: of each kind of tensor the one in which rounding hides most.
    """

    deviations: tuple[TensorDeviation, ...]
    omitted: tuple[str, ...]
    blind_spots: Mapping[str, TensorDeviation]

    @cached_property
    def first(self) -> TensorDeviation | None:
        """The first tensor outside rounding-error tolerance."""
        return next((tensor for tensor in self.deviations if tensor.beyond), None)

    @override
    def as_json(self) -> dict[str, Any]:
        return {
            "schema": 2,
            **super().as_json(),
            "sees": {kind: tensor.sees for kind, tensor in self.blind_spots.items()},
            "margin": deviation.MARGIN,
            "dithered": DITHERED,
            "first": _finite(self.first) if self.first else None,
            "modules": [_module(name, tensors) for name, tensors in deviation.by_module(self.deviations).items()],
            "tensors": [_finite(tensor) for tensor in self.deviations],
            "not_compared": list(self.omitted),
        }

    @override
    def lines(self) -> Iterator[str | Text | Table]:
        yield self._table()
        yield from super().lines()
        if self.omitted:
            count = plural(len(self.omitted), "tensor")
            yield Text(f"not compared: {count} that one of the two lacks, such as {self.omitted[0]}", style="dim")
        yield Text(f"all tensors: {self.directory}/audit.json", style="dim")

    def _table(self) -> Table:
        """Return the modules that are outside rounding-error tolerance, then the furthest of the others."""
        every = deviation.by_module(self.deviations)
        worst = {name: _worst(tensors) for name, tensors in every.items()}
        beyond = {name: {tensor.kind for tensor in tensors if tensor.beyond} for name, tensors in every.items()}
        shown = sorted(every, key=lambda name: (not beyond[name], -max(worst[name].values(), default=0.0)))[:_ROWS]
        kinds = [kind for kind in _KINDS if any(kind in worst[name] for name in shown)]
        table = Table(
            Column("module", overflow="fold"),
            *(Column(_KINDS[kind], justify="right", no_wrap=True) for kind in kinds),
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
            caption=f"error / what rounding moves there; beyond {deviation.MARGIN:g} it is none",
            caption_justify="left",
        )
        for name in (name for name in every if name in shown):
            factors = [worst[name].get(kind) for kind in kinds]
            texts = ("" if x is None else "∞" if x == math.inf else f"{x:.2g}" for x in factors)
            styles = ("red" if kind in beyond[name] else "" for kind in kinds)
            table.add_row(name.removeprefix("decoder."), *map(Text, texts, styles))
        return table


@dataclass(frozen=True)
class AuditRun(Record):
    """An audit of a configuration.

    settings: in the order of the command. verdict: one of the audit's, or FAILED.
    first:    "KIND MODULE" of the first tensor outside rounding-error tolerance, or "KIND NAME" of the first lost
    state; None: none.
    """

    settings: Listed[str]
    verdict: str
    text: str
    first: str | None
    seconds: float
    known: str | None = None
    size: float | None = None
    reference: float | None = None
    ranks: str | None = None

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return self.verdict in (WITHIN, WHOLE)

    @property
    def covers(self) -> bool:
        """Whether its configuration need not be tried again: nothing is known to be wrong."""
        return EXIT_STATUS.get(self.verdict) in (0, 2)

    def same_fault(self, other: "AuditRun") -> bool:
        """Whether both have one fault: the same tensor of any layer or expert, and the same known fault or none."""
        names = [_NUMBER.sub("*", trial.first or trial.text.partition("\n")[0]) for trial in (self, other)]
        return (self.verdict, self.known, names[0]) == (other.verdict, other.known, names[1])


@dataclass(frozen=True)
class ShrunkFault:
    """A fault, shrunk.

    settings: of its configuration. trial: the smallest audit that shows it. command: of that audit.
    script:   the file of a program that shows it; None: there is none.
    """

    settings: tuple[str, ...]
    trial: AuditRun
    command: str
    script: str | None

    def as_json(self) -> dict[str, Any]:
        """Return what `audits.json` holds of it."""
        trial = asdict(self.trial)
        shown = {name: trial[name] for name in ("verdict", "text", "known", "size", "reference", "ranks")}
        words = {"option": " ".join(self.settings), "module": self.trial.first}
        return {"settings": self.settings, "command": self.command, **words, **shown, "script": self.script}


@dataclass(frozen=True)
class CampaignResult(Result):
    """All audits of a model so far.

    pairs, pending: of settings that audits shall cover, and those left. seconds: of the whole; None: it goes on.
    refused: setting -> why it was not tried. sizes: overrides that make the model small.
    resume_at: the step of the audited resumes; None: layouts are audited.
    """

    directory: Path
    model: str
    overrides: tuple[str, ...]
    sizes: tuple[str, ...]
    pairs: int
    pending: int
    seconds: float | None
    refused: Mapping[str, str]
    trials: tuple[AuditRun, ...]
    findings: tuple[ShrunkFault, ...]
    resume_at: int | None = None

    @property
    @override
    def exit_status(self) -> int:
        if any(finding.trial.verdict in (BEYOND, DIFFERS) for finding in self.findings):
            return 1
        return 2 if self.findings or any(EXIT_STATUS.get(trial.verdict) == 2 for trial in self.trials) else 0

    @override
    def as_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "model": self.model,
            "overrides": list(self.overrides),
            "sizes": list(self.sizes),
            "resume_at": self.resume_at,
            "exit_status": self.exit_status,
            "directory": str(self.directory),
            "pairs": self.pairs,
            "pending": self.pending,
            "seconds": self.seconds,
            "refused": dict(self.refused),
            "trials": [asdict(trial) for trial in self.trials],
            "findings": [finding.as_json() for finding in self.findings],
        }

    @override
    def lines(self) -> Iterator[str]:
        for finding in self.findings:
            yield f"{finding.trial.verdict}: {finding.trial.text}"
            if finding.trial.known:
                yield f"    known: {finding.trial.known}"
            yield f"    {finding.command}"
            if finding.script:
                yield f"    torchrun --standalone {finding.script}"
        yield from (f"not tried: {setting}: {reason}" for setting, reason in self.refused.items())
        count, faults = plural(len(self.trials), "audit"), plural(len(self.findings), "fault")
        yield f"{faults} in {count} of {self.pairs - self.pending} pairs; {self.directory}/audits.json"


def blind_line(tensor: TensorDeviation) -> str:
    """Return the verdict where rounding hides too much."""
    return f"{NOT_DECIDED}: rounding hides errors of {tensor.name} up to {tensor.sees:.0%}, and nothing else is wrong"


def verdict_line(deviations: Sequence[TensorDeviation], first: TensorDeviation | None, omitted: Sequence[str]) -> str:
    """Return the verdict on all tensors. first: outside rounding-error tolerance; None: there is none."""
    steps = sorted({tensor.step for tensor in deviations})
    if first is None:
        largest = max(deviations, key=lambda tensor: tensor.factor)
        over = f"steps {steps[0]} to {steps[-1]}" if steps[1:] else f"step {steps[0]}"
        return (
            f"{WITHIN}: {plural(len(deviations), 'tensor')} of {over}; the furthest is {largest.factor:.2g} × "
            f"rounding, {largest.name}; {_seen(deviations)}"
            + (f"; {plural(len(omitted), 'tensor')} not compared" if omitted else "")
        )
    what = _named(first)
    if first.name.endswith("/auxiliary"):
        what = f"the gradient of the auxiliary losses in {first.module}"
    far = f"is {first.factor:.3g} × rounding" if first.factor < float("inf") else "differs where rounding moves nothing"
    parts = [f"{what} {far} at step {first.step}"]
    if first.ranks and len(first.ranks) < first.all_ranks:
        parts.append(f"on ranks {', '.join(map(str, first.ranks))} of {first.all_ranks}")
    if first.shape:
        parts.append(first.shape)
    return f"{BEYOND}: {', '.join(parts)}"


def _seen(deviations: Sequence[TensorDeviation]) -> str:
    """Return the errors that the audit would have seen."""
    spots = deviation.blind_spots(deviations)
    words = {"forward": "outputs", "backward": "gradients inside", "gradients": "gradients", "updates": "updates"}
    sizes = [f"{spots[kind].sees:.1%} in {name}" for kind, name in words.items() if kind in spots]
    return f"an error of {', '.join(sizes)} would have been seen" if sizes else "too few elements to see errors in"


def _named(tensor: TensorDeviation) -> str:
    """Return the tensor in words: "the bias gradient of decoder.layers.0.mlp.linear_fc2 [64]"."""
    if tensor.kind not in _FLOW:
        return f"the {tensor.module}"
    words, parameter = _FLOW[tensor.kind], tensor.name.rpartition(".")[2]
    if tensor.kind in ("weights", "gradients", "updates") and parameter != "weight":
        words = words.replace("weight", parameter) if "weight" in words else f"{words} of the {parameter}"
    return f"{words} of {tensor.module} {[*tensor.dims]}"


_FLOW = {
    "weights": "the initial weight",
    "forward": "the output",
    "backward": "the input gradient",
    "gradients": "the weight gradient",
    "updates": "the update",
}


def _finite(tensor: TensorDeviation) -> dict[str, Any]:
    """Without infinities, which JSON lacks: a factor is None then."""
    fields = {"of" if name == "all_ranks" else name: value for name, value in asdict(tensor).items()}
    return fields | {"factor": tensor.factor if tensor.factor < float("inf") else None, "beyond": tensor.beyond}


def _module(name: str, tensors: Sequence[TensorDeviation]) -> dict[str, Any]:
    """Return a module's row of JSON: the largest factor of each kind that it has; None: infinite."""
    return {
        "module": name,
        **{kind: None if factor == math.inf else factor for kind, factor in _worst(tensors).items()},
        "beyond": sorted({tensor.kind for tensor in tensors if tensor.beyond}, key=deviation.KINDS.index),
    }


def _worst(tensors: Sequence[TensorDeviation]) -> dict[str, float]:
    """Return the largest factor of each kind."""
    kinds = dict.fromkeys(tensor.kind for tensor in tensors)
    return {kind: max(tensor.factor for tensor in tensors if tensor.kind == kind) for kind in kinds}
