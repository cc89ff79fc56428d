"""Compare two ledgers: do they record the same experiment, and where do their bits first differ?"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tp_invariant_recipes.compare.explanation import explain
from tp_invariant_recipes.compare.step_order import (
    FIELD,
    INITIAL,
    MODEL,
    RECORDS,
    Found,
    differences,
    differing,
    traced,
)
from tp_invariant_recipes.ledger.bits import ulp_distance
from tp_invariant_recipes.ledger.digests import Parameter, in_order
from tp_invariant_recipes.ledger.lines import (
    DIGESTED,
    FLOATS,
    Difference,
    Header,
    StepRecord,
    identity_differences,
    informative_differences,
)
from tp_invariant_recipes.ledger.reader import Ledger


class Verdict(Enum):
    """The result of a comparison."""

    IDENTICAL = "identical"  # everything that both runs recorded at every common step is equal
    DIFFERENT = "different"
    NOT_COMPARABLE = "not comparable"  # different experiments, or no common step


EXIT_STATUS = {Verdict.IDENTICAL: 0, Verdict.DIFFERENT: 1, Verdict.NOT_COMPARABLE: 2}
UNREADABLE = 2  # the exit status when a ledger cannot be read


@dataclass(frozen=True)
class FirstDifference:
    """The first difference of two runs.

    step:  0: the models or their initial weights differ, before any step.
    phase: "model", "initial", or a phase of the step: "data", "forward", "loss", "backward", "gradient", "norm",
           "update".
    kind, name, a, b: as in `step_order.Found`.
    ulp:   distance of two numbers. None: not two numbers of one width; `compare.magnitude` computes that of tensors.
    inputs_matched: whether all inputs of its computation were equal. None: unknown, or it is itself an input.
    explanation: the difference as a clause, such as "forward of decoder.layers.2.mlp.linear_fc2: output differs, …".
    """

    step: int
    phase: str
    kind: str
    name: str
    a: str | int | bool | None
    b: str | int | bool | None
    ulp: int | None
    inputs_matched: bool | None
    explanation: str


@dataclass(frozen=True)
class ParameterDifference:
    """The steps at which the gradient, the weight or the moments of one parameter differ."""

    name: str
    kind: str  # a key of DIGESTED
    steps: tuple[int, ...]  # ascending, at least one

    @property
    def first_step(self) -> int:
        """The first of the steps."""
        return self.steps[0]


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


@dataclass(frozen=True)
class Comparison:
    """The result of comparing ledger `b` with ledger `a`."""

    verdict: Verdict
    a: Ledger
    b: Ledger
    steps_compared: int  # 0 if `refused` is not empty
    steps_differing: int
    steps_skipped: int  # compared steps that both runs skipped
    first: FirstDifference | None
    model: tuple[Found, ...]  # parameters of another shape or dtype, or missing in one run, if both runs list any
    initial: tuple[Found, ...]  # parameters whose weights differ before the first step, if both runs recorded them
    parameters: tuple[ParameterDifference, ...]  # by first step, then in the order of execution
    coverage: dict[str, Coverage]  # of RECORDS: the keys of DIGESTED, and "trace"
    trace: TraceCoverage
    refused: tuple[Difference, ...]  # differing fields of the identity, which make the runs incomparable
    informed: tuple[Difference, ...]  # the other header fields that differ

    @property
    def exit_status(self) -> int:
        """0 identical, 1 different, 2 not comparable."""
        return EXIT_STATUS[self.verdict]

    @property
    def steps_digested(self) -> int:
        """The number of steps at which both runs have digests of gradients and of weights or master weights."""
        return min(self.coverage["gradients"].both, max(self.coverage[kind].both for kind in ("masters", "weights")))

    @property
    def steps_total(self) -> int:
        """The number of steps of the longer ledger."""
        return max(len(self.a.steps), len(self.b.steps))


def compare(a: Ledger, b: Ledger, *, repetition: bool = False) -> Comparison:
    """Compare headers, then every common step bit for bit.

    Steps, digests and traced tensors that only one ledger has are no difference (a run may be killed or still
    running, and digests cost time), but the counts show them. Disagreeing replicas in either run are a difference.

    repetition: `b` is `a` trained again. Then replicas that disagree in the same way in both are no difference, and
                neither are those of tensors that only one run digested.
    """
    refused = identity_differences(a.header, b.header)
    # Readers check that steps count from 1 without gaps, so the common steps are a common prefix.
    pairs = [] if refused else list(zip(a.steps, b.steps, strict=False))
    order = in_order({p.name for ledger in (a, b) for p in ledger.header.parameters})
    model = _model_differences(a.header, b.header) if pairs else ()
    initial = _initial_differences(a.header, b.header) if pairs else ()

    def first_of(left: StepRecord, right: StepRecord) -> Found | None:
        if left is right and not left.diverged:  # lines of the same bytes
            return None
        return next(differences(left, right, order, repetition=repetition), None)

    found = {left.step: one for left, right in pairs if (one := first_of(left, right))}
    return Comparison(
        verdict=_verdict(bool(pairs), bool(model or initial or found)),
        a=a,
        b=b,
        steps_compared=len(pairs),
        steps_differing=len(found),
        steps_skipped=sum(left.skipped and right.skipped for left, right in pairs),
        first=_first(a, b, (*model, *initial), found, order),
        model=model,
        initial=initial,
        parameters=_parameters(pairs, order),
        coverage={name: _coverage(name, pairs) for name in RECORDS},
        trace=_trace_coverage(pairs),
        refused=refused,
        informed=(*_schema_difference(a.header, b.header), *informative_differences(a.header, b.header)),
    )


def _schema_difference(a: Header, b: Header) -> tuple[Difference, ...]:
    """That one run was recorded by an older version, whose lines say less."""
    return () if a.schema == b.schema else (Difference("schema", str(a.schema), str(b.schema)),)


def _verdict(comparable: bool, different: bool) -> Verdict:
    if not comparable:
        return Verdict.NOT_COMPARABLE
    return Verdict.DIFFERENT if different else Verdict.IDENTICAL


def _model_differences(a: Header, b: Header) -> tuple[Found, ...]:
    """The parameters that differ between the runs. A run that lists none made no digests; then the result is empty."""
    if not a.parameters or not b.parameters:
        return ()
    left, right = ({p.name: _described(p) for p in header.parameters} for header in (a, b))
    found = []
    for name in in_order(left | right):
        if name not in left or name not in right:
            found.append(
                Found(MODEL, MODEL, name, *(", ".join(one[name]) if name in one else None for one in (left, right)))
            )
        else:
            pairs = zip(left[name], right[name], strict=True)
            found += [Found(MODEL, MODEL, name, one, other) for one, other in pairs if one != other]
    return tuple(found)


def _initial_differences(a: Header, b: Header) -> tuple[Found, ...]:
    left, right = a.initial or {}, b.initial or {}
    common = in_order(left.keys() & right.keys())
    return tuple(Found(INITIAL, INITIAL, n, left[n], right[n]) for n in common if left[n] != right[n])


def _described(parameter: Parameter) -> tuple[str, str, str]:
    gradient = f"{parameter.gradient} gradient" if parameter.gradient else "no gradient"
    return f"shape {list(parameter.shape)}", gradient, f"{parameter.weight} weight"


def _first(
    a: Ledger, b: Ledger, before: Sequence[Found], found: dict[int, Found], order: Sequence[str]
) -> FirstDifference | None:
    if before:
        step, first = 0, before[0]
    elif found:
        step, first = next(iter(found.items()))
    else:
        return None
    matched, words = explain(first, step, a, b, order)
    ulp = None
    if first.kind == FIELD and first.name in FLOATS and first.a is not None and first.b is not None:
        ulp = ulp_distance(str(first.a), str(first.b))
    return FirstDifference(step, first.phase, first.kind, first.name, first.a, first.b, ulp, matched, words)


def _parameters(
    pairs: Sequence[tuple[StepRecord, StepRecord]], order: Sequence[str]
) -> tuple[ParameterDifference, ...]:
    steps: dict[tuple[str, str], list[int]] = {}  # filled, and so iterated, in the order of execution
    for left, right in pairs:
        for kind in DIGESTED if left is not right else ():
            for name in differing(left, right, kind, order):
                steps.setdefault((name, kind), []).append(left.step)
    return tuple(ParameterDifference(name, kind, tuple(at)) for (name, kind), at in steps.items())


def _coverage(name: str, pairs: Sequence[tuple[StepRecord, StepRecord]]) -> Coverage:
    has = [tuple(getattr(record, name) is not None for record in pair) for pair in pairs]
    return Coverage(has.count((True, True)), has.count((True, False)), has.count((False, True)))


def _trace_coverage(pairs: Sequence[tuple[StepRecord, StepRecord]]) -> TraceCoverage:
    compared, only_a, only_b, undigested = set[str](), set[str](), set[str](), set[str]()
    for left, right in pairs:
        if left.trace is None or right.trace is None:
            continue
        for direction in ("forward", "backward"):
            one, other = traced(left.trace, direction), traced(right.trace, direction)
            only_a |= one.keys() - other.keys()
            only_b |= other.keys() - one.keys()
            for name in one.keys() & other.keys():
                (undigested if None in (one[name].digest, other[name].digest) else compared).add(name)
    return TraceCoverage(len(compared), len(only_a), len(only_b), len(undigested))
