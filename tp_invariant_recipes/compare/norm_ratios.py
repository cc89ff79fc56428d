"""Two trainings on the same data from the same weights: are their gradient norms equal up to rounding?

The effect of rounding is measured: a third training repeats the first, with every weight changed by one unit in its
last place at each step that counts (training/gradient_norms.py). Its deviation from the first training is the
deviation that rounding may cause.

    deviation(a, b)        = |ln(b / a)|,  0 where both are the same number
    allowed(group, step)   = MARGIN × the largest deviation that rounding gave a parameter of the group up to this step
                             (at least the deviation of half of all parameters, since a group may have one parameter)

The limit uses only steps up to this one: rounding moves trainings apart over time, so the limit of the last step would
hide a fault at the first. Both trainings compute the same in the steps before those that count. If their norms differ
there, the trainings do not repeat themselves, and that deviation counts as rounding, too.

Rounding may change the choice of experts, so that an expert gets no token in one training, and no deviation of its
norms is too large. Its parameters are set aside from that step on, and every other parameter is judged.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tp_invariant_recipes.compare.parameter_groups import groups_in_order, parameter_group
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.reading import Count, Record

# One sample of rounding is not the largest possible. Faults that drop or repeat a micro-batch change norms far more.
MARGIN = 4.0


@dataclass(frozen=True)
class Norms(Record):
    """Gradient norms of a step, before clipping: parameter's name in the whole model → L2 norm of its whole gradient.

    graphs: number of CUDA graphs that the step replayed.
    """

    step: Count
    graphs: Count
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
class SetAside:
    """A parameter that is not judged from a step on: rounding alone takes its norm from or to 0, or to no number.

    since:       the first step that is not judged.
    first, other: its norms in the two trainings that should differ by rounding only.
    """

    name: str
    group: str
    since: int
    first: float
    other: float


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
    """groups: in the order of the table. ratios: of every parameter that is judged at one step at least.

    repeats: whether the steps before were equal. aside: parameters that are not judged at all steps, or at none.
    """

    groups: tuple[GroupRatio, ...]
    ratios: tuple[Ratio, ...]
    repeats: bool
    aside: tuple[SetAside, ...] = ()

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
    aside: dict[str, SetAside] = {}
    noise: list[dict[str, float]] | None = None
    if rounded is not None:
        noisy = _split(first, rounded, counts_from)[0]
        aside = _aside(noisy, before)
        noise = _noise(noisy, before, aside)
    ratios = [
        _furthest(name, judged, noise)
        for name in first[0].norms
        if (judged := [p for p in counted if name not in aside or p[0].step < aside[name].since])
    ]
    if not ratios:
        raise RunError(
            f"rounding alone takes the gradient of every parameter, such as {next(iter(aside))}, from or to 0, or to "
            "no number: nothing can be judged"
        )
    groups = {name: [ratio for ratio in ratios if ratio.group == name] for name in {one.group for one in ratios}}
    found = tuple(_group(name, groups[name], counted) for name in groups_in_order(set(groups)))
    repeats = all(a.norms == b.norms for a, b in before)
    return Judged(found, tuple(ratios), repeats, tuple(aside.values()))


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
    """pairs: the first of the steps that count. allowed: for each step that counts, group → deviation; None: all norms
    are equal.
    """
    group = parameter_group(name)
    limits = [one[group] for one in allowed[: len(pairs)]] if allowed else [0.0] * len(pairs)
    deviations = [deviation(a.norms[name], b.norms[name]) for a, b in pairs]
    beyond = [pair[0].step for pair, far, limit in zip(pairs, deviations, limits, strict=True) if far > limit]
    at = max(range(len(pairs)), key=lambda n: _excess(deviations[n], limits[n]))
    a, b = pairs[at]
    return Ratio(
        name=name,
        group=group,
        step=a.step,
        first=a.norms[name],
        second=b.norms[name],
        ratio=1.0 if deviations[at] == 0 else None if math.isinf(deviations[at]) else b.norms[name] / a.norms[name],
        deviation=deviations[at],
        allowed=limits[at] if allowed else None,
        since=beyond[0] if beyond else None,
    )


def _excess(found: float, limit: float) -> float:
    """A deviation as a multiple of the allowed one, which may be 0."""
    return found / limit if limit else math.inf if found else 0.0


def _aside(rounded: Pairs, before: Pairs) -> dict[str, SetAside]:
    """The parameters with an infinite deviation by rounding alone, and the first step that must not be judged."""
    start = rounded[0][0].step
    found: dict[str, SetAside] = {}
    for a, b in (*before, *rounded):
        for name in a.norms:
            one, other = a.norms[name], b.norms[name]
            if name not in found and math.isinf(deviation(one, other)):
                found[name] = SetAside(name, parameter_group(name), max(start, a.step), one, other)
    return found


def _noise(rounded: Pairs, before: Pairs, aside: Mapping[str, SetAside]) -> list[dict[str, float]]:
    """For each step that counts, group → the allowed deviation. Raises RunError when rounding changed nothing.

    rounded: the first training and the rounded one. before: the pair's steps that should have been equal.
    aside:   parameters that show nothing of rounding from a step on.
    """
    start = rounded[0]
    if start[0].norms == start[1].norms:
        raise RunError(
            f"changing all weights by rounding changed no gradient of step {start[0].step}, so that nothing is known "
            "of rounding: weights that are gathered late are not reached; ddp.overlap_param_gather=false"
        )
    largest = dict.fromkeys(start[0].norms, 0.0)
    group_of = {name: parameter_group(name) for name in largest}
    allowed = []
    for pair in (*before, *rounded):
        step = pair[0].step
        judged = [name for name in largest if name not in aside or step < aside[name].since]
        for name in judged:
            largest[name] = max(largest[name], deviation(pair[0].norms[name], pair[1].norms[name]))
        if step < start[0].step:
            continue
        # A deviation from before a parameter was set aside still shows what rounding may do to its group.
        moved = dict.fromkeys(group_of.values(), median(largest[name] for name in judged) if judged else 0.0)
        for name, group in group_of.items():
            moved[group] = max(moved[group], largest[name])
        allowed.append({group: MARGIN * far for group, far in moved.items()})
    return allowed


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
