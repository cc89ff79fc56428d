# SPDX-License-Identifier: Apache-2.0
"""Compare two ledgers: do they record the same experiment, and where do their bits first differ?"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from tp_invariant_recipes.comparison.explanation import Scene, explain
from tp_invariant_recipes.comparison.step_order import INITIAL, MODEL, ValueDifference, is_float
from tp_invariant_recipes.comparison.tally import Tally
from tp_invariant_recipes.ledger.bits import ulp_distance
from tp_invariant_recipes.ledger.digests import Parameter, in_order
from tp_invariant_recipes.ledger.reader import PROGRESS_EVERY, Ledger, Progress
from tp_invariant_recipes.ledger.run_files import changes
from tp_invariant_recipes.ledger.schema import (
    CAPABILITY,
    Header,
    HeaderDifference,
    fingerprint_differences,
    informative_differences,
)
from tp_invariant_recipes.ledger.stream import abreast


class Verdict(Enum):
    """The result of a comparison."""

    IDENTICAL = "identical"  # everything that both runs recorded at every common step is equal
    DIFFERENT = "different"
    NOT_COMPARABLE = "not comparable"  # different experiments, no common step, or only one run has a value


EXIT_STATUS = {Verdict.IDENTICAL: 0, Verdict.DIFFERENT: 1, Verdict.NOT_COMPARABLE: 2}
UNREADABLE = 2  # the exit status when a ledger cannot be read


@dataclass(frozen=True)
class FirstDifference(ValueDifference):
    """The first difference of two runs.

    step: 0: the models or their initial weights differ, before any step.
    ulp:  distance of two numbers. None: not two numbers of one width; `compare.magnitude` computes the distance of
          tensors.
    inputs_matched: whether all inputs of its computation were equal. None: unknown, or it is itself an input.
    explanation: the difference as a clause, such as "forward of decoder.layers.2.mlp.linear_fc2: output differs, …".
    """

    step: int
    ulp: int | None
    inputs_matched: bool | None
    explanation: str


@dataclass(frozen=True)
class Unmatched:
    """What only one run recorded, which makes runs incomparable unless another value differs.

    name: of `FirstDifference`, a kind, or "initial". step: the first; 0: before. run: that has it.
    """

    name: str
    step: int
    run: Ledger


@dataclass(frozen=True)
class Comparison:
    """The result of comparing ledger `b` with ledger `a`."""

    verdict: Verdict
    a: Ledger
    b: Ledger
    first: FirstDifference | None
    # parameters of another shape or dtype, or missing in one run, if both runs list any
    model: tuple[ValueDifference, ...]
    # parameters whose weights differ before the first step, if both runs recorded them
    initial: tuple[ValueDifference, ...]
    unmatched: tuple[Unmatched, ...]
    refused: tuple[HeaderDifference, ...]  # differing fields of the identity, which make the runs incomparable
    informed: tuple[HeaderDifference, ...]  # the other header fields that differ
    tally: Tally  # of all compared steps, none if `refused` is not empty

    @property
    def exit_status(self) -> int:
        """0 identical, 1 different, 2 not comparable."""
        return EXIT_STATUS[self.verdict]

    @property
    def steps_digested(self) -> int:
        """The number of steps at which both runs have digests of gradients and of weights or master weights."""
        coverage = self.tally.coverage
        return min(coverage["gradients"].both, max(coverage[kind].both for kind in ("masters", "weights")))

    @property
    def steps_total(self) -> int:
        """The number of steps of the longer ledger."""
        return max(len(self.a.steps), len(self.b.steps))


def compare(a: Ledger, b: Ledger, *, repetition: bool = False) -> Comparison:
    """Compare headers, then every common step bit for bit, in one pass over both.

    Steps and digests that only bitwise identical ledgers has are no difference (a run may be killed or still running,
    and digests cost time), but the counts show them. So are traced tensors, unless both runs have the same modules.
    Replicas that disagree in either run are a difference.
    LedgerError: a step that is still in a file cannot be read.

    repetition: `b` is `a` trained again. Then replicas that disagree in the same way in both are no difference, and
                neither are those of tensors that only one run digested.
    """
    (comparison,) = compare_all(a, [b], repetition=repetition)
    return comparison


def compare_all(
    a: Ledger, others: Sequence[Ledger], *, repetition: bool = False, progress: Progress | None = None
) -> tuple[Comparison, ...]:
    """As `compare`, in one pass over all `others`. progress: told (steps read, steps of the longest) now and then."""
    refused = [fingerprint_differences(a.header, b.header) for b in others]
    tallies = [
        Tally(
            in_order({p.name for ledger in (a, b) for p in ledger.header.parameters}),
            modules=_modules(a.header) == _modules(b.header),
            places=a.header.layout == b.header.layout and changes(a.header) == changes(b.header),
            repetition=repetition,
        )
        for b in others
    ]
    comparable = [n for n, fields in enumerate(refused) if not fields]
    # Readers check that steps count from 1 without gaps, so the common steps are a common prefix.
    read = [a, *(others[n] for n in comparable)] if comparable else []
    total = max((len(ledger.steps) for ledger in read), default=0)
    for step, (first, *records) in enumerate(abreast(read), start=1):
        for n, other in zip(comparable, records, strict=True):
            tallies[n].add(first, other)
        if progress and step % PROGRESS_EVERY == 0:
            progress(step, total)
    return tuple(itertools.starmap(partial(_comparison, a), zip(others, refused, tallies, strict=True)))


def _modules(header: Header) -> tuple[Any, ...]:
    return header.numerics, header.versions, {**header.device, CAPABILITY: None}


def _comparison(a: Ledger, b: Ledger, refused: tuple[HeaderDifference, ...], tally: Tally) -> Comparison:
    comparable = tally.compared > 0
    model = _model_differences(a.header, b.header) if comparable else ()
    initial = _initial_differences(a.header, b.header) if comparable else ()
    alone = _unmatched(a, b, tally) if comparable else ()
    verdict = Verdict.DIFFERENT if model or initial or tally.first else Verdict.IDENTICAL
    if not comparable or (alone and verdict is Verdict.IDENTICAL):
        verdict = Verdict.NOT_COMPARABLE
    return Comparison(
        verdict=verdict,
        a=a,
        b=b,
        first=_first(a, b, (*model, *initial), tally),
        model=model,
        initial=initial,
        unmatched=alone,
        refused=refused,
        informed=informative_differences(a.header, b.header),
        tally=tally,
    )


def _model_differences(a: Header, b: Header) -> tuple[ValueDifference, ...]:
    """Return the parameters that differ; none where a run lists none, because it made no digests."""
    if not a.parameters or not b.parameters:
        return ()
    in_a, in_b = ({p.name: _described(p) for p in header.parameters} for header in (a, b))
    differences = []
    for name in in_order(in_a | in_b):
        if name not in in_a or name not in in_b:
            whole = (", ".join(run[name]) if name in run else None for run in (in_a, in_b))
            differences.append(ValueDifference(MODEL, MODEL, name, *whole))
        else:
            pairs = zip(in_a[name], in_b[name], strict=True)
            differences += [
                ValueDifference(MODEL, MODEL, name, value, other) for value, other in pairs if value != other
            ]
    return tuple(differences)


def _initial_differences(a: Header, b: Header) -> tuple[ValueDifference, ...]:
    in_a, in_b = a.initial or {}, b.initial or {}
    common = in_order(in_a.keys() & in_b.keys())
    return tuple(ValueDifference(INITIAL, INITIAL, n, in_a[n], in_b[n]) for n in common if in_a[n] != in_b[n])


def _unmatched(a: Ledger, b: Ledger, tally: Tally) -> tuple[Unmatched, ...]:
    """By step. A run without parameters recorded no digests at all, by its settings."""
    before = []
    if (a.header.initial is None) != (b.header.initial is None) and a.header.parameters and b.header.parameters:
        before = [Unmatched(INITIAL, 0, b if a.header.initial is None else a)]
    partial = (Unmatched(name, step, a if in_a else b) for (name, in_a), step in tally.unmatched.items())
    return (*before, *partial)


def _described(parameter: Parameter) -> tuple[str, str, str, str]:
    gradient, master = parameter.gradient or "no", parameter.master or "no"
    shape = f"shape {list(parameter.shape)}"
    return shape, f"{gradient} gradient", f"{parameter.weight} weight", f"{master} master weight"


def _first(a: Ledger, b: Ledger, before: Sequence[ValueDifference], tally: Tally) -> FirstDifference | None:
    if before:
        step, first = 0, before[0]
    elif tally.first:
        step, first = tally.first
    else:
        return None
    matched, words = explain(Scene(first, step, a, b, tally.around, tally.order))
    ulp = None
    if is_float(first.kind, first.name) and first.a is not None and first.b is not None:
        ulp = ulp_distance(str(first.a), str(first.b))
    return FirstDifference(**vars(first), step=step, ulp=ulp, inputs_matched=matched, explanation=words)
