# SPDX-License-Identifier: Apache-2.0
"""Detects hanging ranks by the time since their last heartbeat, and names the rank that the others wait for."""

import linecache
import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

from tp_invariant_recipes.reading import Appended, Bounds, Count, Record, Seconds
from tp_invariant_recipes.runs.lock import process_stat
from tp_invariant_recipes.training.heartbeat import WRITE_FRAMES, Heartbeats, Limits, Phase, Sign

ANSWER = 3.0  # seconds that ranks get to answer
POLL = 0.1
LONGEST = 1 << 20  # bytes of an answer

_BESIDE = Path(__file__).parents[2]  # the checkout, or site-packages

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)\b.*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')

# In a backward pass on a GPU the main thread waits for a thread of autograd, which calls Python functions.
_WAITS_FOR_AUTOGRAD, _AUTOGRAD = "_engine_run_backward", "/torch/autograd/function.py"
# Frames of a collective: torch's own, and those that wrap them.
_COLLECTIVES = re.compile(
    r"/torch/(_ops|distributed/(distributed_c10d|c10d_logger|_functional_collectives|rendezvous))\.py$"
)
_WRAPPERS = ("wrapper", "__call__")  # functions there that say nothing
# Lines at which C code waits: for the GPU, which may itself wait for a collective, or for the handle of a collective.
_WAITS_FOR_GPU = re.compile(r"\.item\(\)|\.tolist\(\)|\.cpu\(\)|\bsynchronize\(|\.wait\(\)")


@dataclass(frozen=True)
class Frame:
    """One call."""

    file: str
    line: int
    function: str

    @property
    def code(self) -> str:
        """The text of the line."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        """File, line and function, and the text of the line. Of a file elsewhere the last three names."""
        file = Path(self.file)
        parts = file.parts
        above = len(_BESIDE.parts) if file.is_relative_to(_BESIDE) else max(len(parts) - 3, 0)
        above = max((n + 1 for n, part in enumerate(parts) if part == "site-packages"), default=above)
        where = f"{'/'.join(parts[above:])}:{self.line} in {self.function}"
        return f"{where}: {self.code[:100]}" if self.code else where


@dataclass(frozen=True)
class Stack:
    """The frames of the thread that trains, the innermost first."""

    frames: tuple[Frame, ...]

    @property
    def waits(self) -> str | None:
        """The collective that the rank waits for: "all_reduce called at FRAME"; None: it does not wait."""
        inside = list(takewhile(lambda frame: _COLLECTIVES.search(frame.file), self.frames))
        names = [frame.function for frame in inside if frame.function not in _WRAPPERS]
        if names:
            caller = f" called at {self.frames[len(inside)]}" if len(inside) < len(self.frames) else ""
            return f"{names[-1]}{caller}"
        if self.frames and _WAITS_FOR_GPU.search(self.frames[0].code):
            return f"its GPU or another rank at {self.frames[0]}"
        return None


def parse(text: str, main: int) -> Stack | None:
    """Return the last dump in a text. main: the identity of the main thread. None: there is none of it."""
    threads: dict[int, list[Frame]] = {}
    current: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.fullmatch(line):
            current = threads[int(thread[1], 16)] = []
        elif frame := _FRAME.fullmatch(line):
            current.append(Frame(frame[1], int(frame[2]), frame[3]))
    frames = threads.get(main)
    if frames is None:
        return None
    if frames and frames[0].function == _WAITS_FOR_AUTOGRAD:
        busy = (t for t in threads.values() if any(_AUTOGRAD in f.file for f in t) and t is not frames)
        frames = next(busy, frames)
    return Stack(tuple(frames))


def answers(logs: Mapping[int, Appended], main: Mapping[int, int]) -> dict[int, Stack]:
    """Return the stacks that ranks write to their logs after the signal, without the ranks that do not answer.

    logs: rank -> its log, from the end that it had before. main: rank -> the identity of its main thread.
    """
    written = dict.fromkeys(logs, b"")
    stacks: dict[int, Stack] = {}
    deadline = time.monotonic() + ANSWER
    while time.monotonic() < deadline and (waited := logs.keys() - stacks.keys()):
        time.sleep(POLL)
        for rank in waited:
            more = logs[rank].read(lines=False)
            written[rank] = (written[rank] + more)[:LONGEST]
            if not more and (stack := parse(written[rank].decode(errors="replace"), main[rank])):
                stacks[rank] = stack
    return stacks


def state(pid: int) -> str:
    """Return the letter by which Linux names the state of a process's main thread, such as T for stopped; "" where it
    has gone."""
    return next(iter(process_stat(pid)), "")


def listed(numbers: Iterable[int], most: int = 8) -> str:
    """rank 1; ranks 0, 2 and 3; ranks 0, 1, 2, … (64 in all)."""
    *others, last = map(str, sorted(numbers))
    if not others:
        return f"rank {last}"
    if len(others) >= most:
        return f"ranks {', '.join(others[:most])}, … ({len(others) + 1} in all)"
    return f"ranks {', '.join(others)} and {last}"


WINDOW = 20  # steps of which the longest counts
LOOK = 1.0  # seconds: the most that counts between two looks; the launcher itself was stopped if it is more
NAMED = 4  # ranks that a message shows one by one
FRAMES = 3  # of each
STEPS = (Phase.STEP, Phase.LONG_STEP)
OUTSIDE = (Phase.READY, Phase.BETWEEN, Phase.EVALUATING)  # before that, a rank does not know from which step it starts
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

    count:   its heartbeats: the fewest is the furthest behind.
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
        self.stepped = [False for _ in ranks]  # whether the first step has ended, which tells nothing of the next

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
        elif before.phase in OUTSIDE and sign.step - before.step > (sign.phase in STEPS):
            took = passed
        else:  # no step has ended
            took = None
        if took is not None and self.stepped[n]:
            self.steps[n].append(took)
        self.stepped[n] |= took is not None
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
        states = {n: state(processes[n].pid) for n in alive}
        requested = [n for n in alive if self.signs[n].count and states[n] not in STOPPED]
        appended = {n: Appended(logs[n], skip=True) for n in requested}
        for n in requested:
            with suppress(ProcessLookupError):
                os.kill(processes[n].pid, WRITE_FRAMES)
        answered = answers(appended, {n: self.signs[n].thread for n in requested})
        return [self._rank_state(n, states[n], answered.get(n)) for n in alive]

    def _rank_state(self, n: int, state: str, stack: Stack | None) -> RankState:
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
        lines = [f"{listed(numbers)} hang{'' if more else 's'}: {_late(worst, len(hanging))}"]
    else:
        worst = max(states, key=lambda state: state.seconds)
        lines = [f"all ranks hang: {listed(o.rank for o in states)}, each waits: {_late(worst, len(states))}"]
    shown = (hanging or list(states))[:NAMED]
    for state in shown:
        first, *callers = state.at
        lines += [f"  {state.name} {state.place}, {first}", *(f"    called at {frame}" for frame in callers)]
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for state in states:
        if state not in shown:
            groups[state.place, state.at[0]].append(state.rank)
    lines += [f"  {listed(ranks)} {place}, {at}" for (place, at), ranks in list(groups.items())[:NAMED]]
    return "\n".join(lines)


def _late(state: RankState, several: int) -> str:
    words = state.late if several == 1 else state.late.replace("has ", "have ", 1).replace("is ", "are ", 1)
    return f"{'it' if several == 1 else 'they'} {words} for {state.seconds:.0f} s"
