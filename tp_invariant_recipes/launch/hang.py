"""Detects hanging ranks by the time since their last heartbeat, and names the rank that the others wait for."""

import os
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tp_invariant_recipes.config.hang_timeout import Limits
from tp_invariant_recipes.launch import stacks
from tp_invariant_recipes.reading import Bounds, Count, Record, Seconds
from tp_invariant_recipes.training.heartbeat import WRITE_FRAMES, Heartbeats, Phase, Sign

WINDOW = 20  # steps of which the longest counts
LOOK = 1.0  # seconds: the most that counts between two looks; the launcher itself was stopped if it is more
NAMED = 4  # ranks that a message shows one by one
FRAMES = 3  # of each
STEPS = (Phase.STEP, Phase.LONG_STEP)
STOPPED = ("T", "t")  # states of a process, as proc(5) names them

# The phase in words; the step that is late; the limit that applies. {0}: its step, {1}: the one after it.
_Words = tuple[str, str, Literal["step", "long_step", "alone"]]
PHASES: dict[Phase, _Words] = {
    Phase.STARTING: ("before its start", "has not started", "alone"),
    Phase.LOADING: ("while it loads Megatron-Bridge", "has not loaded Megatron-Bridge and the model", "alone"),
    Phase.SETTING_UP: ("in its set-up", "has not set up process groups, model and checkpoint", "alone"),
    Phase.JOINING: ("in its set-up", "has not joined the process groups", "long_step"),
    Phase.OPENING_DATA: ("while it opens the data", "has not opened its data", "alone"),
    Phase.READY: ("before its first step", "has not begun step {1}", "alone"),
    Phase.STEP: ("in step {0}", "has not ended step {0}", "step"),
    Phase.LONG_STEP: ("in step {0}", "has not ended step {0}", "long_step"),
    Phase.BETWEEN: ("after step {0}", "has ended step {0} and has not begun another", "alone"),
    Phase.EVALUATING: ("in the evaluation after step {0}", "has not ended the evaluation after step {0}", "long_step"),
    Phase.ENDING: ("after its last step", "has not ended after its last step", "alone"),
    Phase.DONE: ("at its end", "is done, and its process has not ended", "alone"),
}

# A rank's state: a stopped rank causes the hang, or else a rank that does anything but wait.
Standing = Literal["stopped", "silent", "busy", "waits"]


@dataclass(frozen=True)
class RankState(Record):
    """The state of one rank, as nodes send it to each other.

    count:   its signs of life: the fewest is the furthest behind.
    place:   its phase: "in step 12". late: the overdue step: "has not ended step 12".
    seconds: since its last sign.
    at:      the collective that it waits for, or its innermost frame and the callers.
    node:    in a job of several nodes, where it runs.
    """

    rank: Count
    count: Count
    place: str
    late: str
    seconds: Seconds
    standing: Standing
    at: Annotated[tuple[str, ...], Bounds(min_length=1, strict=False)]
    node: str = ""

    @property
    def name(self) -> str:
        """rank 3; rank 3 (on n1)."""
        return f"rank {self.rank} (on {self.node})" if self.node else f"rank {self.rank}"


class HangWatch:
    """Watches the heartbeats of this machine's ranks. A check is cheap."""

    def __init__(self, heartbeats: Heartbeats, ranks: Sequence[int], limits: Limits | None) -> None:
        """ranks: their numbers. limits: None: no rank is ever overdue."""
        self.heartbeats, self.ranks, self.limits = heartbeats, ranks, limits
        self.clock = 0.0  # seconds that the launcher itself has been running
        self.looked = time.monotonic()
        self.signs = [heartbeats[n] for n in range(len(ranks))]
        self.since = [0.0 for _ in ranks]  # on the clock: when the sign came
        self.ran = [0.0 for _ in ranks]  # on the clock: when it was last not stopped
        self.steps: list[deque[float]] = [deque(maxlen=WINDOW) for _ in ranks]  # seconds
        self.warm = [False for _ in ranks]  # whether the first step has ended, which tells nothing of the next

    def overdue(self, states: Sequence[str]) -> bool:
        """Whether a rank that lives has given no sign for longer than it may, or is stopped for longer.

        states: of all ranks here, as `stacks.state` has them; "": it has ended.
        """
        now = time.monotonic()
        passed = min(now - self.looked, LOOK)
        self.clock, self.looked = self.clock + passed, now
        for n, before in enumerate(self.signs):
            sign = self.heartbeats[n]
            if sign.count != before.count:
                self._take(n, before, sign, passed)
        for n, state in enumerate(states):
            if state != "T":  # a debugger's "t" has the limits of a rank that runs
                self.ran[n] = self.clock
        return any(state and self._is_late(n) for n, state in enumerate(states))

    def _is_late(self, n: int) -> bool:
        stopped = self.limits is not None and self.clock - self.ran[n] > self.limits.stopped
        return stopped or self.clock - self.since[n] > self._limit(n)

    def _take(self, n: int, before: Sign, sign: Sign, passed: float) -> None:
        """Note new heartbeats since the last check, `passed` seconds ago. A step between two checks took no longer."""
        if before.phase in STEPS:
            took = self.clock - self.since[n]
        elif sign.step - before.step > (sign.phase in STEPS):
            took = passed
        else:  # no step has ended
            took = None
        if took is not None and self.warm[n]:
            self.steps[n].append(took)
        self.warm[n] |= took is not None
        self.signs[n], self.since[n] = sign, self.clock

    def _limit(self, n: int) -> float:
        if self.limits is None:
            return float("inf")
        kind = PHASES[self.signs[n].phase][2]
        if kind == "step":
            return self.limits.of_step(max(self.steps[n], default=None))
        return self.limits.long_step if kind == "long_step" else self.limits.alone

    def rank_states(self, processes: Sequence[Any], logs: Sequence[Path]) -> list[RankState]:
        """Where the ranks that live stand now. It asks them, which takes up to `stacks.ANSWER` seconds.

        processes, logs: of all ranks here.
        """
        alive = [n for n, process in enumerate(processes) if process.is_alive()]
        states = {n: stacks.state(processes[n].pid) for n in alive}
        requested = [n for n in alive if self.signs[n].count and states[n] not in STOPPED]
        before = {n: (logs[n], stacks.size_of(logs[n])) for n in requested}
        for n in requested:
            with suppress(ProcessLookupError):
                os.kill(processes[n].pid, WRITE_FRAMES)
        answers = stacks.answers(before, {n: self.signs[n].thread for n in requested})
        return [self._rank_state(n, states[n], answers.get(n)) for n in alive]

    def _rank_state(self, n: int, state: str, stack: stacks.Stack | None) -> RankState:
        sign = self.signs[n]
        place, late, _ = (words.format(sign.step, sign.step + 1) for words in PHASES[sign.phase])
        standing: Standing
        at: tuple[str, ...]
        if state in STOPPED:
            standing, at = "stopped", ("stopped by a signal (SIGSTOP), so it cannot say where",)
        elif stack is None:
            waits = ", in an uninterruptible wait for a file system or a driver" if state == "D" else ""
            standing, at = "silent", (f"it does not say where{waits}",)
        elif stack.waits:
            standing, at = "waits", (f"waiting for {stack.waits}",)
        else:
            frames = [str(frame) for frame in stack.frames[:FRAMES]] or ["no function of Python"]
            standing, at = "busy", (f"at {frames[0]}", *frames[1:])
        return RankState(self.ranks[n], sign.count, place, late, self.clock - self.since[n], standing, at)


def suspects(states: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that the others wait for: stopped ranks, or else the ranks furthest behind that do not wait.

    Empty: all are equally far and wait, so no one is to blame alone.
    """
    stopped = [state for state in states if state.standing == "stopped"]
    if stopped:
        return stopped
    fewest = min(state.count for state in states)
    behind = [state for state in states if state.count == fewest]
    busy = [state for state in behind if state.standing != "waits"]
    return busy or (behind if len(behind) < len(states) else [])


def message(states: Sequence[RankState]) -> str:
    """Which ranks hang, at which step, where they stand; then those that wait for them."""
    hanging = suspects(states)
    if hanging:
        worst = max(hanging, key=lambda state: state.seconds)
        numbers = [state.rank for state in hanging]
        more = "s" if len(hanging) > 1 else ""
        lines = [f"{stacks.listed(numbers)} hang{'' if more else 's'}: {_late(worst, len(hanging))}"]
    else:
        worst = max(states, key=lambda state: state.seconds)
        lines = [f"all ranks hang: {stacks.listed(o.rank for o in states)}, each waits: {_late(worst, len(states))}"]
    shown = (hanging or list(states))[:NAMED]
    for state in shown:
        first, *callers = state.at
        lines += [f"  {state.name} {state.place}, {first}", *(f"    called at {frame}" for frame in callers)]
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for state in states:
        if state not in shown:
            groups[state.place, state.at[0]].append(state.rank)
    lines += [f"  {stacks.listed(ranks)} {place}, {at}" for (place, at), ranks in list(groups.items())[:NAMED]]
    return "\n".join(lines)


def _late(state: RankState, several: int) -> str:
    words = state.late if several == 1 else state.late.replace("has ", "have ", 1).replace("is ", "are ", 1)
    return f"{'it' if several == 1 else 'they'} {words} for {state.seconds:.0f} s"
