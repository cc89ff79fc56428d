# SPDX-License-Identifier: Apache-2.0
"""A rank's heartbeats: what it does now, in memory that the launcher reads.

A sign is three numbers in shared memory and takes the rank about a microsecond. All ranks give the same signs in the
same order, so the rank with the fewest is the one furthest behind.
"""

import faulthandler
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tp_invariant_recipes.check import recording
from tp_invariant_recipes.settings import cuda_graphs
from tp_invariant_recipes.settings.run_config import RunConfig

# By default a step may take so many times the longest of the last steps, and always so many seconds: a file system or a
# network may be away for a minute.
FACTOR, LEAST = 5, 120.0
# Seconds for what each rank does by itself: to import Bridge, to read and write a checkpoint, to capture CUDA graphs.
ALONE = 1800.0
# The others wait in a collective for a rank that is late in a step, and their library gives up at its own limit. This
# part of it is ours: then the message names the rank that is late, not one of those that waited.
OF_COLLECTIVES = 0.9
# Seconds for a rank that SIGSTOP stopped, whatever it did: nothing that a run waits for stops a process.
STOPPED = 60.0
SETTLING = 2  # steps after a start that compile and warm up


@dataclass(frozen=True)
class Limits:
    """Seconds without a heartbeat.

    step:      None: it follows the longest of the last steps.
    long_step: of a step that compiles, captures or writes tensors; of one of an evaluation.
    alone:     of what ranks do outside of steps.
    stopped:   of a rank that a signal has stopped, while its launcher runs.
    """

    step: float | None
    long_step: float
    alone: float
    stopped: float = STOPPED

    def of_step(self, longest: float | None) -> float:
        """longest: of the last steps, in seconds; None: none is known."""
        if self.step is not None:
            return self.step
        if longest is None:
            return self.long_step
        return max(LEAST, 2 * longest, min(FACTOR * longest, self.long_step))


def limits(config: RunConfig) -> Limits | None:
    """Return the limits of a run; None: off."""
    requested, dist = config.run.hang_timeout, config.section("dist")
    if requested == "off":
        return None
    if isinstance(requested, int):
        return Limits(requested, requested, requested, requested)
    of_collectives = dist.get("distributed_timeout_seconds_after_init") or 60 * dist.get(
        "distributed_timeout_minutes", 10
    )
    long_step = max(OF_COLLECTIVES * of_collectives, LEAST)
    return Limits(None, long_step, max(ALONE, long_step))


def takes_long(config: RunConfig, step: int, start: int) -> bool:
    """Whether a step may take longer than those around it.

    start: steps that were done when the ranks were started.
    """
    done, model, trace = step - 1 - start, config.model, config.ledger.trace
    if done < SETTLING or (trace and step in recording.steps(trace)):
        return True
    if not cuda_graphs.requested(model):
        return False
    return 0 <= done + 1 - (model.get("cuda_graph_warmup_steps") or 0) <= SETTLING


# The signal at which a rank writes the Python frames of its threads to its log, also while it is stuck in C.
WRITE_FRAMES = signal.SIGUSR2
POLL = 0.002  # seconds between looks at whether all ranks are started


class Phase(IntEnum):
    """What a rank does."""

    STARTING = 0  # its process may not exist yet
    LOADING = 1
    SETTING_UP = 2
    OPENING_DATA = 3
    READY = 4
    STEP = 5
    LONG_STEP = 6  # one that compiles, captures or writes tensors
    BETWEEN = 7  # two steps: it may save or evaluate
    EVALUATING = 8
    ENDING = 9
    DONE = 10
    JOINING = 11  # a part of SETTING_UP: the process groups, in which ranks wait for each other


@dataclass(frozen=True)
class Sign:
    """The last sign of a rank.

    count: how many it has given; 0: none, and it does not know WRITE_FRAMES yet.
    step:  the one that it is in, or has ended last.
    thread: the identity of its main thread, as Python's faulthandler writes it.
    """

    count: int
    phase: Phase
    step: int
    thread: int


class Heartbeats:
    """The last signs of the ranks of one machine. It travels to a new process as an argument, and no other way."""

    FIELDS = 4  # of 8 bytes: those of Sign

    def __init__(self, ranks: int, context: Any) -> None:
        """context: multiprocessing's, by which the ranks are started."""
        self._memory = context.RawArray("q", ranks * self.FIELDS)
        self._all_started = context.RawValue("b", 0)

    def __getitem__(self, index: int) -> Sign:
        """Return the last sign of the rank at this place."""
        count, phase, step, thread = self._memory[index * self.FIELDS : (index + 1) * self.FIELDS]
        return Sign(count, Phase(phase), step, thread)

    def sign(self, index: int, phase: Phase, step: int | None = None) -> None:
        """Write down what the rank at this place does. step: None: unchanged."""
        memory, at = self._memory, index * self.FIELDS
        memory[at + 1] = phase
        if step is not None:
            memory[at + 2] = step
        memory[at] += 1

    def release_ranks(self) -> None:
        """All ranks are started: end the waiting of those that are here, and of those that come."""
        self._all_started.value = 1

    def wait_for_all(self) -> None:
        """Wait until all ranks are started.

        A rank that reached the launcher's store earlier would set the store's thread to work, and a rank forked
        meanwhile would inherit whatever lock that thread holds, for good. It looks again and again, since a
        multiprocessing.Event waits for all who wait for it: one that was killed there would stop the launcher for ever.
        """
        while not self._all_started.value:
            time.sleep(POLL)

    def begin(self, index: int) -> None:
        """Make this process the rank at this place: it gives signs, and answers WRITE_FRAMES on standard error."""
        global _mine  # noqa: PLW0603  one of a process
        faulthandler.register(WRITE_FRAMES, file=2, all_threads=True)
        self._memory[index * self.FIELDS + 3] = threading.main_thread().ident or 0
        _mine = (self, index)
        sign(Phase.LOADING)


_mine: tuple[Heartbeats, int] | None = None  # where this process gives its signs, once it is a rank


def sign(phase: Phase, step: int | None = None) -> None:
    """Give a sign. It does nothing in a process that the launcher has not started."""
    if _mine is not None:
        heartbeats, index = _mine
        heartbeats.sign(index, phase, step)


def _signs(phase: Phase) -> Callable[[Any, Any], None]:
    return lambda self, context: sign(phase)


class First:
    """The callback that gives a sign where a step begins. Comes before all others, so that theirs are in the step.

    Not a subclass of Bridge's, which finds the methods by their names, so that this module does not import Bridge.
    """

    def __init__(self, takes_long: Callable[[int, int], bool]) -> None:
        """takes_long: whether a step may take long, from its number and the number of steps done when this began."""
        self.takes_long = takes_long
        self.start = 0

    on_data_init_start = _signs(Phase.OPENING_DATA)  # the model is there, with the checkpoint's weights
    on_eval_step_start = on_test_step_start = _signs(Phase.EVALUATING)

    def on_train_start(self, context: Any) -> None:
        """All is there."""
        self.start = context.state.train_state.step
        sign(Phase.READY, self.start)

    def on_train_step_start(self, context: Any) -> None:
        """Note that a step begins."""
        step = context.state.train_state.step + 1
        sign(Phase.LONG_STEP if self.takes_long(step, self.start) else Phase.STEP, step)


class Last:
    """The callback that gives a sign where a step ends. Comes after all others."""

    on_train_step_end = on_eval_end = _signs(Phase.BETWEEN)
    on_train_end = _signs(Phase.ENDING)
