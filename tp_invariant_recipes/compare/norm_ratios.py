"""Two trainings on the same data from the same weights: are their gradient norms equal up to rounding?

The effect of rounding is measured: a third training repeats the first, with every weight changed by one unit in its
last place at each step that counts (training/gradient_norms.py). Its deviation from the first training is the
deviation that rounding may cause.

    deviation(a, b)        = |ln(b / a)|,  0 where both are the same number
    allowed(group, step)   = MARGIN × the largest deviation that rounding gave a parameter of the group up to this step
                             (and no less than that of half of all parameters, since a group may have one parameter)

The limit uses only steps up to this one: rounding moves trainings apart over time, so the limit of the last step would
hide a fault at the first. Both trainings compute the same in the steps before those that count. If their norms differ
there, the trainings do not repeat themselves, and that deviation counts as rounding, too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tp_invariant_recipes.compare.parameter_groups import groups_in_order, parameter_group
from tp_invariant_recipes.errors import RunError

# One sample of rounding is not the largest possible. Faults that drop or repeat a micro-batch change norms far more.
MARGIN = 4.0


@dataclass(frozen=True)
class Norms:
    """Gradient norms of a step, before clipping: parameter's name in the whole model → L2 norm of its whole gradient.

    graphs: number of CUDA graphs that the step replayed.
    """

    step: int
    graphs: int
    norms: dict[str, float]


@dataclass(frozen=True)
class Ratio:
    """A parameter at the step at which its deviation is largest relative to the allowed one.

    ratio:   second / first; None: one is 0 or not finite, and the other is not.
    allowed: the deviation that rounding may cause at that step; None: not measured, since all bits are equal.
    since:   the first step at which the deviation exceeds the allowed one; None: no step.
    """

    name: str
    group: str
    step: int
    first: float
    second: float
    ratio: float | None
    deviation: float
    allowed: float | None
    since: int | None


@dataclass(frozen=True)
class GroupRatio:
    """The parameters of a group together.

    first, second: root of the sum of the squares of their norms, for the mean step.
    low, median, high: of their ratios; None: there is none (see `Ratio`).
    worst:         the parameter with the largest deviation relative to the allowed one.
    since:         the first step at which a parameter exceeds the allowed deviation; None: no step.
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
    since: int | None
    state: str


@dataclass(frozen=True)
class Judged:
    """groups: in the order of the table. ratios: of every parameter. repeats: whether the steps before were equal."""

    groups: tuple[GroupRatio, ...]
    ratios: tuple[Ratio, ...]
    repeats: bool

    @property
    def different(self) -> tuple[GroupRatio, ...]:
        """Groups whose norms differ by more than rounding."""
        return tuple(group for group in self.groups if group.state == "different")


def same(first: Sequence[Norms], second: Sequence[Norms]) -> bool:
    """Whether all norms of all steps are equal."""
    return [one.norms for one in first] == [one.norms for one in second]


def judge_ratios(
    first: Sequence[Norms], second: Sequence[Norms], rounded: Sequence[Norms] | None, *, counts_from: int
) -> Judged:
    """Compare two trainings. Raises RunError when their steps or parameters differ, or when nothing can be judged.

    rounded:     the first training with its weights changed by rounding; None: `same` holds, so no limit is needed.
    counts_from: the first judged step.
    """
    _alike(first, second, *([rounded] if rounded is not None else []))
    counted, before = _split(first, second, counts_from)
    noise = None if rounded is None else _noise(_split(first, rounded, counts_from)[0], before)
    ratios = [_furthest(name, counted, noise) for name in first[0].norms]
    groups = {name: [ratio for ratio in ratios if ratio.group == name] for name in {one.group for one in ratios}}
    found = tuple(_group(name, groups[name], counted) for name in groups_in_order(set(groups)))
    return Judged(found, tuple(ratios), all(a.norms == b.norms for a, b in before))


def deviation(first: float, second: float) -> float:
    """The deviation |ln(second / first)| of two norms; infinite if only one is 0, or one is not a number."""
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
    """The steps that count, and the steps before them."""
    pairs = list(zip(first, second, strict=True))
    return [p for p in pairs if p[0].step >= counts_from], [p for p in pairs if p[0].step < counts_from]


def _furthest(name: str, pairs: Pairs, allowed: list[dict[str, float]] | None) -> Ratio:
    """allowed: for each pair, group → deviation; None: all norms are equal."""
    group = parameter_group(name)
    limits = [one[group] for one in allowed] if allowed else [0.0] * len(pairs)
    apart = [deviation(a.norms[name], b.norms[name]) for a, b in pairs]
    beyond = [pair[0].step for pair, far, limit in zip(pairs, apart, limits, strict=True) if far > limit]
    at = max(range(len(pairs)), key=lambda n: _excess(apart[n], limits[n]))
    a, b = pairs[at]
    return Ratio(
        name=name,
        group=group,
        step=a.step,
        first=a.norms[name],
        second=b.norms[name],
        ratio=1.0 if apart[at] == 0 else None if math.isinf(apart[at]) else b.norms[name] / a.norms[name],
        deviation=apart[at],
        allowed=limits[at] if allowed else None,
        since=beyond[0] if beyond else None,
    )


def _excess(apart: float, limit: float) -> float:
    """A deviation as a multiple of the allowed one, which may be 0."""
    return apart / limit if limit else math.inf if apart else 0.0


def _noise(rounded: Pairs, before: Pairs) -> list[dict[str, float]]:
    """For each step that counts, group → the allowed deviation. Raises RunError when rounding changed nothing.

    rounded: the first training and the rounded one. before: the pair's steps that should have been equal.
    """
    start = rounded[0]
    if start[0].norms == start[1].norms:
        raise RunError(
            f"changing all weights by rounding changed no gradient of step {start[0].step}, so that nothing is known "
            "of rounding: weights that are gathered late are not reached; ddp.overlap_param_gather=false"
        )
    largest = {name: max((_moved(name, *pair) for pair in before), default=0.0) for name in start[0].norms}
    allowed = []
    for pair in rounded:
        largest = {name: max(far, _moved(name, *pair)) for name, far in largest.items()}
        least = median(largest.values())
        groups = {parameter_group(name): [least] for name in largest}
        for name, far in largest.items():
            groups[parameter_group(name)].append(far)
        allowed.append({group: MARGIN * max(moved) for group, moved in groups.items()})
    return allowed


def _moved(name: str, first: Norms, second: Norms) -> float:
    """The deviation of a parameter by rounding alone. Raises RunError when it is infinite."""
    far = deviation(first.norms[name], second.norms[name])
    if math.isinf(far):
        raise RunError(f"rounding alone takes the gradient of {name} from 0 or to no number: nothing can be judged")
    return far


def _group(name: str, members: list[Ratio], counted: Pairs) -> GroupRatio:
    worst = max(members, key=lambda one: _excess(one.deviation, one.allowed or 0.0))
    ratios = sorted(one.ratio for one in members if one.ratio is not None)
    since = min((one.since for one in members if one.since is not None), default=None)
    moved = any(one.deviation for one in members)
    return GroupRatio(
        name=name,
        parameters=len(members),
        first=_together(members, [a for a, _ in counted]),
        second=_together(members, [b for _, b in counted]),
        low=ratios[0] if ratios else None,
        median=median(ratios) if ratios else None,
        high=ratios[-1] if ratios else None,
        worst=worst,
        since=since,
        state="different" if since is not None else "rounding" if moved else "equal",
    )


def _together(members: list[Ratio], steps: Sequence[Norms]) -> float:
    squares = [step.norms[one.name] ** 2 for step in steps for one in members]
    return math.sqrt(math.fsum(squares) / len(steps))
