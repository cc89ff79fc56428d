"""The stacks of a rank's threads, requested by a signal and read from its log. A rank stuck in C answers, too.

Python's faulthandler answers. It writes Python frames and no C frames, so a rank that waits for its GPU stands at the
line that waits.
"""

import linecache
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

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


def answers(logs: dict[int, tuple[Path, int]], main: dict[int, int]) -> dict[int, Stack]:
    """Return the stacks that ranks write to their logs after the signal, without the ranks that do not answer.

    logs: rank -> its log, and the size that it had before. main: rank -> the identity of its main thread.
    """
    sizes: dict[int, int] = {}
    stacks: dict[int, Stack] = {}
    deadline = time.monotonic() + ANSWER
    while time.monotonic() < deadline and (waited := logs.keys() - stacks.keys()):
        time.sleep(POLL)
        for rank in waited:
            log, before = logs[rank]
            size = size_of(log)
            if size > before and size == sizes.get(rank) and (stack := parse(_read(log, before), main[rank])):
                stacks[rank] = stack
            sizes[rank] = size
    return stacks


def size_of(log: Path) -> int:
    """Bytes of a log that may not exist yet."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def _read(log: Path, position: int) -> str:
    with suppress(OSError), log.open("rb") as stream:
        stream.seek(position)
        return stream.read(LONGEST).decode(errors="replace")
    return ""


def state(pid: int) -> str:
    """Return the letter by which Linux names the state of a process's main thread, such as T for stopped; "" where it
    is
    gone. Source: proc(5), /proc/PID/stat."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def listed(numbers: Iterable[int], most: int = 8) -> str:
    """rank 1; ranks 0, 2 and 3; ranks 0, 1, 2, … (64 in all)."""
    *others, last = map(str, sorted(numbers))
    if not others:
        return f"rank {last}"
    if len(others) >= most:
        return f"ranks {', '.join(others[:most])}, … ({len(others) + 1} in all)"
    return f"ranks {', '.join(others)} and {last}"
