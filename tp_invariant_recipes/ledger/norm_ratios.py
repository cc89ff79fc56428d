"""Two trainings on the same data from the same weights: are their gradient norms equal, but for rounding?

What rounding does is measured, not guessed: a third training computes as the first does, with every weight changed by
one unit in its last place at each step that counts (training/gradient_norms.py). By how much that moves a norm is by
how much rounding may move it.

    deviation(a, b)  = |ln(b / a)|,  0 where both are the same number
    allowed(group)   = MARGIN × the largest deviation that rounding gave a parameter of the group at any step
                       (and no less than that of half of all parameters, since a group may have one parameter only)

A step before those that count is the same computation in both; if it is not the same number, the trainings do not
repeat themselves, and by how much they do not counts as rounding, too.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.ledger.parameter_groups import group_of, in_order

# One sample of rounding is not its largest. Faults that drop or repeat a micro-batch change norms by far more.
MARGIN = 4.0


@dataclass(frozen=True)
class Norms:
    """Gradient norms of a step, before clipping: name of a parameter in the whole model → L2 norm of all of it.

    graphs: how many CUDA graphs were replayed for it.
    """

    step: int
    graphs: int
    norms: dict[str, float]


@dataclass(frozen=True)
class Ratio:
    """A parameter at the step at which the second training is furthest from the first.

    ratio: second / first; None: one is 0 or no number, and the other is not.
    """

    name: str
    group: str
    step: int
    first: float
    second: float
    ratio: float | None
    deviation: float


@dataclass(frozen=True)
class GroupRatio:
    """What a group's parameters have together.

    first, second: root of the sum of the squares of their norms, of the mean step.
    low, median, high: of their ratios; None: there is none (see `Ratio`).
    allowed:       how far from 1 a ratio may be, as a factor; None: it was not measured, since all bits are the same.
    state:         "equal", "rounding" or "different".
    """

    name: str
    parameters: int
    first: float
    second: float
    low: float | None
    median: float | None
    high: float | None
    worst: Ratio
    allowed: float | None
    state: str


@dataclass(frozen=True)
class Judged:
    """groups: in the order of a table. ratios: of every parameter. repeats: whether the steps before were the same."""

    groups: tuple[GroupRatio, ...]
    ratios: tuple[Ratio, ...]
    repeats: bool

    @property
    def different(self) -> tuple[GroupRatio, ...]:
        """Groups whose norms differ by more than rounding."""
        return tuple(group for group in self.groups if group.state == "different")


def same(first: Sequence[Norms], second: Sequence[Norms]) -> bool:
    """Whether all norms of all steps are the same numbers."""
    return [one.norms for one in first] == [one.norms for one in second]


def judge(
    first: Sequence[Norms], second: Sequence[Norms], rounded: Sequence[Norms] | None, *, counts_from: int
) -> Judged:
    """Compare two trainings. Raises RunError when they have other steps or parameters, or when nothing can be judged.

    rounded:     the first with its weights changed by rounding; None: `same` holds, and nothing needs to be allowed.
    counts_from: the first step that is judged.
    """
    _alike(first, second, *([rounded] if rounded is not None else []))
    counted, before = _split(first, second, counts_from)
    names = list(first[0].norms)
    ratios = {name: _furthest(name, counted) for name in names}
    noise = None if rounded is None else _noise(names, _split(first, rounded, counts_from)[0], before)
    groups = {name: [ratio for ratio in ratios.values() if ratio.group == name] for name in map(group_of, names)}
    allowed = {} if noise is None else _allowed(groups, noise)
    found = tuple(_group(name, groups[name], counted, allowed.get(name)) for name in in_order(set(groups)))
    return Judged(found, tuple(ratios.values()), all(a.norms == b.norms for a, b in before))


def deviation(first: float, second: float) -> float:
    """How far two norms are apart: |ln(second / first)|; infinite where only one is 0, or one is no number."""
    if first == second:
        return 0.0
    if not (math.isfinite(first) and math.isfinite(second)) or first <= 0 or second <= 0:
        return math.inf
    return abs(math.log(second) - math.log(first))


Pairs = list[tuple[Norms, Norms]]


def _alike(*trainings: Sequence[Norms]) -> None:
    steps = {tuple(one.step for one in training) for training in trainings}
    names = {frozenset(one.norms) for training in trainings for one in training}
    if len(steps) != 1 or () in steps or len(names) != 1:
        raise RunError("the trainings of an audit have other steps or parameters than each other")


def _split(first: Sequence[Norms], second: Sequence[Norms], counts_from: int) -> tuple[Pairs, Pairs]:
    """The steps that count, and those before."""
    pairs = list(zip(first, second, strict=True))
    return [p for p in pairs if p[0].step >= counts_from], [p for p in pairs if p[0].step < counts_from]


def _furthest(name: str, pairs: Pairs) -> Ratio:
    apart = [(deviation(a.norms[name], b.norms[name]), a, b) for a, b in pairs]
    far, a, b = max(apart, key=lambda one: one[0])
    first, second = a.norms[name], b.norms[name]
    ratio = 1.0 if far == 0 else None if math.isinf(far) else second / first
    return Ratio(name, group_of(name), a.step, first, second, ratio, far)


def _noise(names: Iterable[str], rounded: Pairs, before: Pairs) -> dict[str, float]:
    """Parameter → the largest deviation that rounding gave it. Raises RunError when rounding changed nothing."""
    if all(a.norms == b.norms for a, b in rounded):
        raise RunError(
            "changing all weights by rounding changed no gradient, so that nothing is known of rounding: "
            "weights that are gathered late are not reached; ddp.overlap_param_gather=false"
        )
    largest = {name: max(deviation(a.norms[name], b.norms[name]) for a, b in [*rounded, *before]) for name in names}
    if any(math.isinf(one) for one in largest.values()):
        wrong = next(name for name, one in largest.items() if math.isinf(one))
        raise RunError(f"rounding alone takes the gradient of {wrong} from 0 or to no number: nothing can be judged")
    return largest


def _allowed(groups: dict[str, list[Ratio]], noise: dict[str, float]) -> dict[str, float]:
    least = median(noise.values())
    return {name: MARGIN * max(least, *(noise[one.name] for one in members)) for name, members in groups.items()}


def _group(name: str, members: list[Ratio], counted: Pairs, allowed: float | None) -> GroupRatio:
    worst = max(members, key=lambda one: one.deviation)
    ratios = sorted(one.ratio for one in members if one.ratio is not None)
    beyond = worst.deviation > (allowed or 0.0)
    return GroupRatio(
        name=name,
        parameters=len(members),
        first=_together(members, [a for a, _ in counted]),
        second=_together(members, [b for _, b in counted]),
        low=ratios[0] if ratios else None,
        median=median(ratios) if ratios else None,
        high=ratios[-1] if ratios else None,
        worst=worst,
        allowed=None if allowed is None else math.exp(allowed),
        state="different" if beyond else "rounding" if worst.deviation else "equal",
    )


def _together(members: list[Ratio], steps: Sequence[Norms]) -> float:
    squares = [step.norms[one.name] ** 2 for step in steps for one in members]
    return math.sqrt(math.fsum(squares) / len(steps))
