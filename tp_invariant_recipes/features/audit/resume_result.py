# SPDX-License-Identifier: Apache-2.0
"""What an audit of a resume found: states that were not restored, and the steps that they change."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, override

from rich.table import Table
from rich.text import Text

from tp_invariant_recipes.features.audit.result import NOT_JUDGED, WHOLE, Judged
from tp_invariant_recipes.ledger.schema import StepRecord
from tp_invariant_recipes.runs.sweep_dir import RankRecord
from tp_invariant_recipes.text import plural

# Kind of state -> its name in words, in the order of the comparison.
KINDS = {
    "weights": "weights",
    "masters": "fp32 master weights",
    "moments": "optimizer moments",
    "scheduler": "scheduler",
    "loss_scale": "loss scale",
    "rng": "RNG states",
    "data": "place in the data",
    "fp8": "FP8 state",
    "router": "router's biases and counters",
    "buffers": "buffers",
    "graphs": "CUDA graphs",
}
GRAPHS = "graphs"  # no checkpoint has graphs: they are captured anew, which is a fault only if bits change
_SHOWN = 20


@dataclass(frozen=True)
class LostState:
    """A state that differs after the resume.

    was, now: its value, if it is short; None: the training has no such state. ranks: those on which it differs.
    """

    kind: str
    name: str
    was: str | None
    now: str | None
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        what = f"{self.name} ({KINDS[self.kind]})" if self.kind not in ("router", "buffers") else self.name
        if self.ranks != (0,):
            what += f" on ranks {', '.join(map(str, self.ranks))}"
        if self.now is None or self.was is None:
            return f"{what} is {'missing' if self.now is None else 'new'} after the resume"
        if self.now == "0":
            return f"{what} starts at 0" + (f" instead of {self.was}" if self.was else "")
        return f"{what} {f'is {self.now} instead of {self.was}' if self.now and self.was else 'was not restored'}"


@dataclass(frozen=True)
class ChangedStep:
    """What differs first in a step. names: of the tensors of that kind."""

    step: int
    what: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        some = f" of {self.names[0]}" if len(self.names) == 1 else ""
        verb = "differ" if self.what in ("tokens per expert", "gradients") else "differs"
        return f"{self.what}{some} {verb} from step {self.step}"


@dataclass(frozen=True)
class ResumeResult(Judged):
    """An uninterrupted training and one that resumed at step `at`, compared bit for bit.

    states: how many were compared, kind → number.
    lost:   states that differ before the first step. changed: what differs in each step that differs.
    facts:  also `graphs`: how many the two have captured before that step, if their numbers differ; `card`: the file.
    """

    at: int
    last: int
    states: Mapping[str, int]
    lost: tuple[LostState, ...]
    changed: tuple[ChangedStep, ...]

    @override
    def as_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            **super().as_json(),
            "resumed_at": self.at,
            "last_step": self.last,
            "states": dict(self.states),
            "lost": [asdict(state) for state in self.lost],
            "changed": [asdict(step) for step in self.changed],
        }

    @override
    def lines(self) -> Iterator[str | Text | Table]:
        yield from super().lines()
        yield from (f"    {state}" for state in self.lost[:_SHOWN])
        if len(self.lost) > _SHOWN:
            yield f"    and {plural(len(self.lost) - _SHOWN, 'more state')}"
        yield from (f"    {step}" for step in self.changed)
        if graphs := self.facts.get("graphs"):
            yield f"{graphs[0]} CUDA graphs before, {graphs[1]} after the resume: they are captured anew"
        if card := self.facts.get("card"):
            yield f"card: {card}"
        yield Text(f"all states: {self.directory}/audit.json", style="dim")

    def card_item(self, device: str, precision: str, losses: Mapping[int, float]) -> dict[str, Any]:
        """Return `checkpoint_resume` as a verification card of Megatron-Bridge has it, with no tolerance."""
        steps, whole = [self.at + 1, self.last], self.verdict == WHOLE
        tolerances = {"loss_relative_tolerance": 0.0, "loss_absolute_tolerance": 0.0}
        compared = {"reference_item": "pretrain", "sentinel_steps": sorted({*steps}), **tolerances}
        fields = {
            "status": "verified" if whole else "unverified",
            "precision": precision,
            "depends_on": "pretrain",
            "command": self.facts["command"],
            "last_verified": self.facts["time"][:10] if whole else None,
            "metrics": {"initial_loss": losses.get(steps[0]), "final_loss": losses.get(steps[1])},
            "resume_comparison": compared | {"sentinels_match": whole},
            "expected_result": self.words,
        }
        return {"checkpoint_resume": {device: fields}}


def lost_states(before: Sequence[RankRecord], after: Sequence[RankRecord]) -> list[LostState]:
    """Return the states that differ, in the order of KINDS. before, after: a record of each rank."""
    differing: dict[str, list[int]] = {}
    for rank, (there, here) in enumerate(zip(before, after, strict=True)):
        for name in {**there.state, **here.state}:
            known, found = there.state.get(name), here.state.get(name)
            if known is None or found is None or known.digest != found.digest:
                differing.setdefault(name, []).append(rank)
    lost = []
    for name, ranks in differing.items():
        kind, _, own = name.partition("/")
        values = [records[ranks[0]].state.get(name) for records in (before, after)]
        was, now = (value.text if value else None for value in values)
        lost.append(LostState(kind, own, was, now, tuple(ranks)))
    return sorted(lost, key=lambda state: [*KINDS].index(state.kind))


def changed_steps(
    steps: range,
    ledgers: tuple[Mapping[int, StepRecord], Mapping[int, StepRecord]],
    records: Sequence[Sequence[RankRecord]],
) -> list[ChangedStep]:
    """Return what differs first in each of the steps, in the order in which a step computes.

    ledgers, records: of the two trainings: step → its line; a record of each rank.
    """
    before, after = ledgers
    return [changed for step in steps if (changed := _changed(step, before[step], after[step], records))]


def _changed(
    step: int, before: StepRecord, after: StepRecord, records: Sequence[Sequence[RankRecord]]
) -> ChangedStep | None:
    if before.learning_rate != after.learning_rate:
        return ChangedStep(step, "learning rate")
    seen = [[record.steps.get(str(step), {}) for record in rank_records] for rank_records in records]
    names = [n for there, here in zip(*seen, strict=True) for n in {**there, **here} if there.get(n) != here.get(n)]
    if "batch" in names:
        return ChangedStep(step, "batch")
    if names:
        routers = dict.fromkeys(name.removeprefix("tokens per expert of ") for name in names)
        return ChangedStep(step, "tokens per expert", tuple(routers))
    if before.loss != after.loss:
        return ChangedStep(step, "loss")
    gradients = [dict(line.gradients or {}) for line in (before, after)]
    if wrong := [name for name in gradients[0] if gradients[1].get(name) != gradients[0][name]]:
        return ChangedStep(step, "gradients", tuple(wrong))
    return ChangedStep(step, "gradient norm") if before.grad_norm != after.grad_norm else None


def verdict_line(
    verdict: str,
    steps: range,
    states: Mapping[str, int],
    lost: Sequence[LostState],
    changed: Sequence[ChangedStep],
    apart: str | None,
) -> str:
    """Return the verdict in one line. apart: what differs first in a repetition of the same training."""
    at, over = steps[0] - 1, f"steps {steps[0]} to {steps[-1]}" if steps[1:] else f"step {steps[0]}"
    if verdict == NOT_JUDGED:
        return f"{verdict}: without a resume the training does not repeat itself: {apart}; numerics=deterministic"
    if verdict == WHOLE:
        kinds = f"{plural(sum(states.values()), 'state')} of {plural(len(states), 'kind')}"
        return f"{verdict}: {kinds} and {over} are bitwise identical after the resume at step {at}"
    if not lost:
        return f"{verdict}: {changed[0]} after the resume at step {at}, and every compared state was restored"
    effect = str(changed[0]) if changed and not apart else f"{over} are bitwise identical all the same"
    if apart:
        effect = f"without a resume the training does not repeat itself either, so that {over} show nothing"
    more = f" (and {plural(len(lost) - 1, 'more state')})" if lost[1:] else ""
    return f"{verdict}: {lost[0]}{more}: {effect}"
