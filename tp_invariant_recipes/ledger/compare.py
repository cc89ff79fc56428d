"""Compare two ledgers: are they of one experiment, and where do their bits first differ?"""

from dataclasses import dataclass
from enum import Enum

from tp_invariant_recipes.ledger.bits import ulp_distance
from tp_invariant_recipes.ledger.lines import (
    FLOATS,
    Difference,
    StepRecord,
    identity_differences,
    informative_differences,
)
from tp_invariant_recipes.ledger.reader import Ledger


class Verdict(Enum):
    """The answer of a comparison."""

    IDENTICAL = "identical"  # every compared field of every common step
    DIFFERENT = "different"
    NOT_COMPARABLE = "not comparable"  # another experiment, or no common step


EXIT_STATUS = {Verdict.IDENTICAL: 0, Verdict.DIFFERENT: 1, Verdict.NOT_COMPARABLE: 2}
UNREADABLE = 2  # the exit status when a ledger cannot be read


@dataclass(frozen=True)
class Field:
    """A compared field of a step record: its name there, its name for people, the phase of the step that gives it."""

    name: str
    label: str
    phase: str

    @property
    def is_float(self) -> bool:
        """Whether the record holds bits as text (or None), not a count or a truth value."""
        return self.name in FLOATS


# In the order of execution: the first field that differs is the nearest to the cause.
FIELDS = (
    Field("samples", "consumed samples", "data"),
    Field("tokens", "tokens", "data"),
    Field("loss", "loss", "forward"),
    Field("grad_norm", "gradient norm", "norm"),
    Field("skipped", "skipped", "update"),
    Field("learning_rate", "learning rate", "update"),
)


@dataclass(frozen=True)
class FirstDifference:
    """Where two runs part, and both values as the records hold them."""

    step: int
    field: Field
    a: str | int | bool | None
    b: str | int | bool | None

    @property
    def ulp(self) -> int | None:
        """The distance in ULP. None: not two numbers of one width."""
        if not self.field.is_float or self.a is None or self.b is None:
            return None
        return ulp_distance(str(self.a), str(self.b))


@dataclass(frozen=True)
class Comparison:
    """What comparing ledger `b` with ledger `a` found."""

    verdict: Verdict
    a: Ledger
    b: Ledger
    steps_compared: int  # 0 where `refused` is not empty
    steps_differing: int
    steps_skipped: int  # compared steps that both runs skipped
    first: FirstDifference | None
    refused: tuple[Difference, ...]  # fields of the identity: why the runs are not comparable
    informed: tuple[Difference, ...]  # the other header fields that differ

    @property
    def exit_status(self) -> int:
        """0 identical, 1 different, 2 not comparable."""
        return EXIT_STATUS[self.verdict]

    @property
    def steps_total(self) -> int:
        """The steps of the longer ledger."""
        return max(len(self.a.steps), len(self.b.steps))


def compare(a: Ledger, b: Ledger) -> Comparison:
    """Compare headers, then every common step bit for bit.

    Steps that only one ledger has are not a difference (a run may be killed, or still going), but the counts say so.
    """
    refused = identity_differences(a.header, b.header)
    # Readers check that steps count from 1 without a gap, so common steps are a common prefix.
    pairs = [] if refused else list(zip(a.steps, b.steps, strict=False))
    differing = [pair for pair in pairs if _differing_fields(*pair)]
    return Comparison(
        verdict=Verdict.NOT_COMPARABLE if not pairs else Verdict.DIFFERENT if differing else Verdict.IDENTICAL,
        a=a,
        b=b,
        steps_compared=len(pairs),
        steps_differing=len(differing),
        steps_skipped=sum(left.skipped and right.skipped for left, right in pairs),
        first=_first_difference(*differing[0]) if differing else None,
        refused=refused,
        informed=informative_differences(a.header, b.header),
    )


def _differing_fields(a: StepRecord, b: StepRecord) -> list[Field]:
    # Floats are compared as text: a NaN equals itself, and the two zeros differ.
    return [field for field in FIELDS if getattr(a, field.name) != getattr(b, field.name)]


def _first_difference(a: StepRecord, b: StepRecord) -> FirstDifference:
    field = _differing_fields(a, b)[0]
    return FirstDifference(a.step, field, getattr(a, field.name), getattr(b, field.name))
