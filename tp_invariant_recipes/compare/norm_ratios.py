"""Two trainings on the same data from the same weights: are their gradient norms equal, but for rounding?

What rounding does is measured, not guessed: a third training computes as the first does, with every weight changed by
one unit in its last place at each step that counts (training/gradient_norms.py). By how much that moves a norm is by
how much rounding may move it.

    deviation(a, b)        = |ln(b / a)|,  0 where both are the same number
    allowed(group, step)   = MARGIN × the largest deviation that rounding gave a parameter of the group up to this step
                             (and no less than that of half of all parameters, since a group may have one parameter)

Up to this step: trainings that differ by rounding move apart, so that what is allowed at the last step would hide a
fault at the first. A step before those that count is the same computation in both; if it is not the same number, the
trainings do not repeat themselves, and by how much they do not counts as rounding, too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tp_invariant_recipes.compare.parameter_groups import groups_in_order, parameter_group
from tp_invariant_recipes.errors import RunError

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
    """A parameter at the step at which its deviation is the largest part, or multiple, of what is allowed.

    ratio:   second / first; None: one is 0 or no number, and the other is not.
    allowed: the deviation that rounding may make at that step; None: not measured, all bits are the same.
    since:   the first step at which it is further; None: at no step.
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
    """What a group's parameters have together.

    first, second: root of the sum of the squares of their norms, of the mean step.
    low, median, high: of their ratios; None: there is none (see `Ratio`).
    worst:         the one that is furthest by what is allowed.
    since:         the first step at which one of them is too far; None: none is at any.
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


def judge_ratios(
    first: Sequence[Norms], second: Sequence[Norms], rounded: Sequence[Norms] | None, *, counts_from: int
) -> Judged:
    """Compare two trainings. Raises RunError when they have other steps or parameters, or when nothing can be judged.

    rounded:     the first with its weights changed by rounding; None: `same` holds, and nothing needs to be allowed.
    counts_from: the first step that is judged.
    """
    _alike(first, second, *([rounded] if rounded is not None else []))
    counted, before = _split(first, second, counts_from)
    noise = None if rounded is None else _noise(_split(first, rounded, counts_from)[0], before)
    ratios = [_furthest(name, counted, noise) for name in first[0].norms]
    groups = {name: [ratio for ratio in ratios if ratio.group == name] for name in {one.group for one in ratios}}
    found = tuple(_group(name, groups[name], counted) for name in groups_in_order(set(groups)))
    return Judged(found, tuple(ratios), all(a.norms == b.norms for a, b in before))


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


def _furthest(name: str, pairs: Pairs, allowed: list[dict[str, float]] | None) -> Ratio:
    """allowed: of each pair, group → deviation; None: all norms are the same numbers."""
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
    """A deviation as a multiple of what is allowed, which may be 0."""
    return apart / limit if limit else math.inf if apart else 0.0


def _noise(rounded: Pairs, before: Pairs) -> list[dict[str, float]]:
    """Of each step that counts: group → the deviation that is allowed. Raises RunError when rounding changed nothing.

    rounded: the first training and the rounded one. before: what should have been the same in the pair.
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
    """The deviation of a parameter that only rounding moved. Raises RunError when it is without end."""
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
