"""Where the seconds until a run's first step go, from the command's start. Forked ranks have its clock."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

IMPORTS, KERNELS = "imports", "kernels and trials"


def process_start() -> float:
    """When this process began, in seconds since 1970, to 0.01 s. Raises OSError, ValueError, IndexError."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _process_start() -> float:
    try:
        return process_start()
    except (OSError, ValueError, IndexError):
        return time.time()


@dataclass
class StartClock:
    """began: the command, or the training before this one in the same process has ended; seconds since 1970.

    setting_up, stepping: when the rank set itself up, and its first step began; 0: not yet.
    before:  the seconds of KERNELS when the first step began.
    seconds: of IMPORTS and KERNELS so far.
    """

    began: float = field(default_factory=_process_start)
    setting_up: float = 0.0
    stepping: float = 0.0
    before: float = 0.0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counting: bool = False

    @contextmanager
    def counted(self, what: str) -> Iterator[None]:
        """Count the seconds of the block, unless it lies in another one that is counted."""
        if self.counting:
            yield
            return
        self.counting, since = True, time.monotonic()
        try:
            yield
        finally:
            self.counting = False
            self.seconds[what] += time.monotonic() - since

    def restart(self) -> None:
        """Forget a training of this process, since another one may follow."""
        self.began, self.seconds = time.time(), defaultdict(float)

    def step_begins(self) -> None:
        """Note that the first step begins on this rank."""
        self.stepping, self.before = time.time(), self.seconds[KERNELS]

    def parts(self) -> dict[str, float]:
        """End the first step, and return what the seconds since the start went to, in order."""
        imports, kernels = self.seconds[IMPORTS], self.seconds[KERNELS]
        return {
            "composing": self.setting_up - self.began - imports,
            IMPORTS: imports,
            "model and data": self.stepping - self.setting_up - self.before,
            KERNELS: kernels,
            "step": time.time() - self.stepping - (kernels - self.before),
        }


CLOCK = StartClock()


def count_kernels() -> None:
    """Count the seconds in which Triton compiles kernels, those of trials included where the trials are counted."""

    def compiled(*, times: Any, **_: Any) -> None:
        if not CLOCK.counting:
            CLOCK.seconds[KERNELS] += times.total / 1e6  # of microseconds

    with suppress(ImportError, AttributeError):  # of another Triton: a breakdown stops no training
        from triton import knobs

        knobs.compilation.listener = knobs.compilation.listener or compiled


def text(parts: Mapping[str, float]) -> str:
    """Return the parts as a line; of a file from elsewhere, those that `StartClock.parts` knows."""
    parts = {name: parts[name] for name in CLOCK.parts() if name in parts}
    each = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05)
    return f"first step after {sum(parts.values()):.1f} s: {each}"
