"""Signs of life of a command that reads for long: from the second second on, on standard error."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tp_invariant_recipes.foreign_text import one_line

PATIENCE = 2.0  # seconds without a word
ON_A_TERMINAL, ELSEWHERE = 0.5, 10.0  # seconds between two words

Watch = Callable[[int, int], None]  # bytes done, bytes in all


@contextmanager
def reading(console: Console) -> Iterator[Callable[[Path], Watch]]:
    """Yields what makes, of a file, the function to tell how far it is read.

    A terminal shows one line that is written over and disappears; elsewhere each word is a line.
    """
    said = time.monotonic()
    pause = PATIENCE
    shown = False

    def watch(file: Path) -> Watch:
        def tell(done: int, total: int) -> None:
            nonlocal said, pause, shown
            now = time.monotonic()
            if now - said < pause:
                return
            said, pause, shown = now, ON_A_TERMINAL if console.is_terminal else ELSEWHERE, True
            words = Text(f"reading {one_line(str(file))}: {done / total:.0%} of {total / 2**20:,.0f} MiB")
            if console.is_terminal:
                console.print(words, end="\r", soft_wrap=True)
            else:
                console.print(words, soft_wrap=True)

        return tell

    try:
        yield watch
    finally:
        if shown and console.is_terminal:
            console.print(" " * (console.width - 1), end="\r", soft_wrap=True)
