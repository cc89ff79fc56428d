"""Signs of life of a command that reads or computes for long: after two seconds, on standard error."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tp_invariant_recipes.foreign_text import one_line

PATIENCE = 2.0  # seconds without a word
ON_A_TERMINAL, ELSEWHERE = 0.5, 10.0  # seconds between two words

ProgressFn = Callable[[int, int], None]  # done, of how many


class Signs:
    """Says how far a command is, if it takes long. A terminal shows one line that is written over."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said, self._pause = time.monotonic(), PATIENCE
        self.shown = False

    def reading(self, file: Path) -> ProgressFn:
        """The function to tell how many bytes of a file are read, and how many it has."""
        return lambda done, total: self._say(
            lambda: f"reading {one_line(str(file))}: {done / total:.0%} of {total / 2**20:,.0f} MiB"
        )

    def counting(self, what: str) -> ProgressFn:
        """The function to tell how many of something are done, as in "comparing: step 2 of 50". what: words before."""
        return lambda done, total: self._say(lambda: f"{what} {done:,} of {total:,}")

    def _say(self, words: Callable[[], str]) -> None:
        now = time.monotonic()
        if now - self._said < self._pause:
            return
        self._said, self._pause, self.shown = now, ON_A_TERMINAL if self._console.is_terminal else ELSEWHERE, True
        if self._console.is_terminal:
            text = Text(words())
            text.truncate(self._console.width - 1, pad=True)  # over a longer line
            self._console.print(text, end="\r", soft_wrap=True)
        else:
            self._console.print(Text(words()), soft_wrap=True)


@contextmanager
def signs_of_life(console: Console) -> Iterator[Signs]:
    """A terminal's line disappears at the end."""
    signs = Signs(console)
    try:
        yield signs
    finally:
        if signs.shown and console.is_terminal:
            console.print(" " * (console.width - 1), end="\r", soft_wrap=True)
