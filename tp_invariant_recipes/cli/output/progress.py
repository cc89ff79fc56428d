"""The progress of a command that reads or computes for more than two seconds, on standard error."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tp_invariant_recipes.foreign_text import single_line

PATIENCE = 2.0  # seconds before the first report
ON_A_TERMINAL, ELSEWHERE = 0.5, 10.0  # seconds between two reports

ProgressFn = Callable[[int, int], None]  # done, of how many


class SlowProgress:
    """Reports how far a slow command is. On a terminal each report overwrites the last one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._reported, self._pause = time.monotonic(), PATIENCE
        self.shown = False

    def reading(self, file: Path) -> ProgressFn:
        """Return a function that reports the bytes read of a file. It takes their number and the file's size."""
        return lambda done, total: self._report(
            lambda: f"reading {single_line(str(file))}: {done / total:.0%} of {total / 2**20:,.0f} MiB"
        )

    def counting(self, what: str) -> ProgressFn:
        """Return a function that reports a count, as in "comparing: step 2 of 50". what: the text before it."""
        return lambda done, total: self._report(lambda: f"{what} {done:,} of {total:,}")

    def _report(self, line: Callable[[], str]) -> None:
        now = time.monotonic()
        if now - self._reported < self._pause:
            return
        self._reported, self._pause, self.shown = now, ON_A_TERMINAL if self._console.is_terminal else ELSEWHERE, True
        if self._console.is_terminal:
            text = Text(line())
            text.truncate(self._console.width - 1, pad=True)  # over a longer line
            self._console.print(text, end="\r", soft_wrap=True)
        else:
            self._console.print(Text(line()), soft_wrap=True)


@contextmanager
def slow_progress(console: Console) -> Iterator[SlowProgress]:
    """Report the progress of the block. The last report disappears from a terminal at the end."""
    slow = SlowProgress(console)
    try:
        yield slow
    finally:
        if slow.shown and console.is_terminal:
            console.print(" " * (console.width - 1), end="\r", soft_wrap=True)
