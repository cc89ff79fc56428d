# SPDX-License-Identifier: Apache-2.0
"""What one pass over the steps of two runs finds and counts. It keeps no step but the last two."""

from collections.abc import Sequence
from dataclasses import dataclass

from tp_invariant_recipes.comparison.step_order import (
    RECORDS,
    ValueDifference,
    differences,
    differing,
    tensors,
    traced,
    unmatched,
    untraced,
)
from tp_invariant_recipes.ledger.schema import DIGESTED, EVALUATED, StepRecord

COVERED = (*RECORDS, *EVALUATED)  # what only some steps have


@dataclass(frozen=True)
class ParameterDifference:
    """The steps at which the gradient, the weight or the moments of one parameter differ."""

    name: str
    kind: str  # a key of DIGESTED
    spans: tuple[range, ...]  # of the steps; at least one, of at least one step

    @property
    def steps(self) -> tuple[int, ...]:
        """All of the steps, ascending."""
        return tuple(step for span in self.spans for step in span)

    @property
    def first_step(self) -> int:
        """The first of the steps."""
        return self.spans[0].start


@dataclass(frozen=True)
class Coverage:
    """The numbers of compared steps at which both runs recorded something, or only one of them did."""

    both: int
    only_a: int
    only_b: int


@dataclass(frozen=True)
class TraceCoverage:
    """The numbers of traced tensors that were compared and that could not be. A tensor counts once for all steps."""

    compared: int
    only_a: int  # traced by only one run
    only_b: int
    undigested: int  # traced by both, but at least one run has no digest of it


class Tally:
    """Takes the steps of two runs, and has what the comparison says of them.

    compared, differing, skipped: numbers of steps: all, those that differ, those that both runs skipped.
    first:       the first differing step, and what differs first in it; None: none.
    around:      the records of both runs of that step and the one before it, by step.
    tensors:     kind of digest -> those that were compared at every step at which both runs have the kind.
    unmatched:   name of what only one run has, and whether that is the first -> the first such step.
    digested:    of either run, whether it has a digest at any step, compared or not.
    later:       of either run, the first step at which replicas disagree and the other run has ended; None: none.
    """

    def __init__(self, order: Sequence[str], *, modules: bool, places: bool, repetition: bool = False) -> None:
        """repetition: as for `compare`.

        order:   the parameters in forward order.
        modules: both runs have the same modules, so that traces of a step list the same tensors.
        places:  both runs have the same layout as well, so that the same tensors have digests.
        """
        self.order, self._repetition = order, repetition
        self._modules, self._places = modules, modules and places
        self.compared = self.differing = self.skipped = 0
        self.first: tuple[int, ValueDifference] | None = None
        self.around: dict[int, tuple[StepRecord, StepRecord]] = {}
        self.tensors: dict[str, set[str]] = {}
        self.unmatched: dict[tuple[str, bool], int] = {}
        self.digested = [False, False]
        self.later: list[int | None] = [None, None]
        self._parameters: dict[tuple[str, str], list[range]] = {}  # filled in the order of execution
        self._counts = {name: [0, 0, 0] for name in COVERED}
        self._traced: tuple[set[str], ...] = (set(), set(), set(), set())

    def add(self, a: StepRecord | None, b: StepRecord | None) -> None:
        """Compare the next step of both runs; None: that run has ended."""
        for side, record in enumerate((a, b)):
            if record is not None and not self.digested[side]:
                self.digested[side] = any(getattr(record, kind) is not None for kind in DIGESTED)
        if a is None or b is None:
            for side, record in enumerate((a, b)):
                if record is not None and record.diverged and self.later[side] is None:
                    self.later[side] = record.step
            return
        self.compared += 1
        self.skipped += a.skipped and b.skipped
        if self.first is None:
            self.around = {step: pair for step, pair in self.around.items() if step == a.step - 1}
            self.around[a.step] = (a, b)
        if a is not b or a.diverged:  # otherwise lines of the same bytes
            self._differences(a, b)
        self._cover(a, b)
        self._cover_evaluations(a, b)
        self._cover_trace(a, b)

    def _differences(self, a: StepRecord, b: StepRecord) -> None:
        difference = next(differences(a, b, self.order, repetition=self._repetition), None)
        if difference is not None:
            self.differing += 1
            if self.first is None:
                self.first = a.step, difference
        for kind in DIGESTED:
            for name in differing(a, b, kind, self.order):
                spans = self._parameters.setdefault((name, kind), [])
                last = spans[-1] if spans else None
                if last is not None and len(last) == 1:
                    spans[-1] = range(last.start, a.step + 1, a.step - last.start)
                elif last is not None and a.step - last[-1] == last.step:
                    spans[-1] = range(last.start, a.step + 1, last.step)
                else:
                    spans.append(range(a.step, a.step + 1))
        alone = [*unmatched(a, b), *(untraced(a, b, self._places) if self._modules else ())]
        for unmatched_name in alone:
            self.unmatched.setdefault(unmatched_name, a.step)

    def _cover(self, a: StepRecord, b: StepRecord) -> None:
        for name in RECORDS:
            there = getattr(a, name), getattr(b, name)
            here, other = (value is not None for value in there)
            if here and other:
                self._counts[name][0] += 1
                if name in DIGESTED:
                    known = self.tensors.setdefault(name, set(there[0]))
                    if not known == there[0].keys() == there[1].keys():
                        known &= there[0].keys() & there[1].keys()
            elif here or other:
                self._counts[name][1 if here else 2] += 1

    def _cover_evaluations(self, a: StepRecord, b: StepRecord) -> None:
        for data in EVALUATED if a.evaluations or b.evaluations else ():
            first, second = (tensors(record, data, ()).keys() for record in (a, b))
            for n, names in enumerate((first & second, first - second, second - first)):
                self._counts[data][n] += bool(names)

    def _cover_trace(self, a: StepRecord, b: StepRecord) -> None:
        if a.trace is None or b.trace is None:
            return
        compared, only_a, only_b, undigested = self._traced
        for direction in ("forward", "backward"):
            entries, other = traced(a.trace, direction), traced(b.trace, direction)
            only_a |= entries.keys() - other.keys()
            only_b |= other.keys() - entries.keys()
            for name in entries.keys() & other.keys():
                (undigested if None in (entries[name].digest, other[name].digest) else compared).add(name)

    @property
    def parameters(self) -> tuple[ParameterDifference, ...]:
        """By first step, then in the order of execution."""
        return tuple(ParameterDifference(name, kind, tuple(spans)) for (name, kind), spans in self._parameters.items())

    @property
    def coverage(self) -> dict[str, Coverage]:
        """Of COVERED."""
        return {name: Coverage(*counts) for name, counts in self._counts.items()}

    @property
    def trace(self) -> TraceCoverage:
        """Of all traced steps together."""
        return TraceCoverage(*map(len, self._traced))

    @property
    def traced(self) -> bool:
        """Whether both runs traced the first differing step."""
        return self.first is not None and all(record.trace is not None for record in self.around[self.first[0]])
