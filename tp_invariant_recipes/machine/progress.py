# SPDX-License-Identifier: Apache-2.0
"""How far a command is, on standard error: a bar on a terminal, elsewhere a line at once or every few seconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from tp_invariant_recipes.text import single_line

PATIENCE = 2.0  # seconds before a count is shown
LEAST = 2.0  # seconds left that are worth a word
EVERY = 10.0  # seconds between two lines of a count
# rich would otherwise take over standard output and error, and ranks forked meanwhile would write to the terminal.
PLAIN: dict[str, Any] = {"redirect_stdout": False, "redirect_stderr": False, "transient": True}

ProgressFn = Callable[[int, int], None]  # done, of how many


def estimate(begun: float, before: int, done: int, total: int) -> str:
    """Return the end of a sentence, how long the rest takes; empty: not known, or no word worth.

    begun: when `before` of `total` were done, by time.monotonic().
    """
    left = (time.monotonic() - begun) * (total - done) / (done - before) if done > before else 0
    return f", about {timedelta(seconds=round(left))} left" if left >= LEAST else ""


class Counter:
    """Shows counts from PATIENCE seconds on, with an estimate of the time left. Use as a context manager.

    On a terminal each count overwrites the last one, and the last disappears at the end.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(TextColumn("{task.description}", markup=False), BarColumn(), console=console, **PLAIN)
        self._task = self._bar.add_task("")
        self._due = time.monotonic() + PATIENCE

    def __enter__(self) -> "Counter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar.live.is_started:
            self._bar.stop()

    def reading(self, file: Path) -> ProgressFn:
        """Return a function that shows the bytes read of a file. It takes their number and the file's size."""
        show, name = self._shown(), single_line(str(file))
        return lambda done, total: show(
            done, total, lambda: f"reading {name}: {done / total:.0%} of {total / 2**20:,.0f} MiB"
        )

    def counting(self, what: str, unit: str = "") -> Callable[..., None]:
        """Return a function that shows a count, as in "comparing: step 2 of 50". what, unit: the text around it.

        It takes how many are done, how many there are, and what else to say.
        """
        show = self._shown()
        return lambda done, total, words="": show(
            done, total, lambda: f"{what} {done:,} of {total:,}{unit}{', ' if words else ''}{words}"
        )

    def _shown(self) -> Callable[[int, int, Callable[[], str]], None]:
        first: list[tuple[float, int]] = []  # when the count began, and at how many: some may be done already

        def show(done: int, total: int, line: Callable[[], str]) -> None:
            now = time.monotonic()
            if not first:
                first.append((now, done))
            if now < self._due:
                return
            words = f"{line()}{estimate(*first[0], done, total)}"
            if self._console.is_terminal:
                self._bar.start()
                self._bar.update(self._task, description=words, completed=done, total=total)
            else:
                self._due = now + EVERY
                self._console.print(Text(words), soft_wrap=True)

        return show


@contextmanager
def busy(console: Console, words: str) -> Iterator[None]:
    """Show a spinner beside `words`, on a terminal; elsewhere a line."""
    if not console.is_terminal:
        console.print(Text(f"{words} …"), soft_wrap=True)
        yield
        return
    with Progress(SpinnerColumn(), TextColumn(words, markup=False), console=console, **PLAIN) as bar:
        bar.add_task("")
        yield
