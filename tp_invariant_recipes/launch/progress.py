# SPDX-License-Identifier: Apache-2.0
"""The progress of a training: a live bar on a terminal, plain lines elsewhere."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from tp_invariant_recipes.launch.plan import Plan, Planning
from tp_invariant_recipes.ledger.run_files import ProgressLine
from tp_invariant_recipes.machine.progress import EVERY, PLAIN, Counter
from tp_invariant_recipes.reading import Appended, checked, parse_json
from tp_invariant_recipes.start.bridge import VERBOSE
from tp_invariant_recipes.text import plural

if TYPE_CHECKING:
    from tp_invariant_recipes.launch.local import Watch

WINDOW = 20  # steps over which tokens/s and the time left are averaged


class Tail:
    """Reads the progress file as it grows."""

    def __init__(self, file: Path, steps: int) -> None:
        """Pass over the steps of earlier restarts. steps: the last step's number."""
        self.steps = steps
        self.events: list[ProgressLine] = []
        self._appended = Appended(file, skip=True)

    def new(self) -> list[ProgressLine]:
        """Return the steps recorded since the last call.

        Half a line at the end waits for its other half. One that never came, since a rank died or a disk was full,
        makes a line that is not JSON with what follows; it is passed over.
        """
        fresh = []
        for line in self._appended.read(lines=True).splitlines():
            with suppress(ValueError):
                fresh.append(checked(ProgressLine, parse_json(line, constants=True)))
        self.events = [*self.events, *fresh][-WINDOW:]
        return fresh

    def tokens_per_second(self) -> float:
        """Over the last steps, without the first, which compiles and warms up."""
        timed = self.events[1:] or self.events
        seconds = sum(e.seconds for e in timed)
        return sum(e.tokens for e in timed) / seconds if seconds else 0.0

    def seconds_remaining(self) -> float:
        """Until the last step, at the pace of the last ones."""
        timed = self.events[1:] or self.events
        return (self.steps - self.events[-1].step) * sum(e.seconds for e in timed) / len(timed)


class Lines:
    """Plain lines: the first steps, then one every few seconds, and the last. Call it to show what is new."""

    def __init__(self, plan: Plan, console: Console, *, log: bool = False) -> None:
        """log: whether to print Bridge's log, too."""
        self.plan, self.console = plan, console
        self.tail = Tail(plan.run_dir.progress, plan.steps)
        self.printed = 0.0
        self.log = Appended(plan.run_dir.bridge_log, skip=True) if log else None

    def __enter__(self) -> "Lines":
        ranks = plural(self.plan.layout.world, f"{self.plan.device} rank")
        self.console.print(Text(f"starting {ranks} …"), soft_wrap=True)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self) -> None:
        """Show the steps that have been recorded since."""
        if self.log is not None:
            self.console.out(self.log.read(lines=False).decode(errors="replace"), end="", highlight=False)
        for event in self.tail.new():
            loss = "skipped" if event.loss is None else f"loss {event.loss:.4f}"
            self.show(event, f"{loss}  {self.tail.tokens_per_second():,.0f} tokens/s")

    def show(self, event: ProgressLine, figures: str) -> None:
        """Show a step, if it is due."""
        first = event.step - self.plan.start <= 3
        if first or event.step == self.plan.steps or time.monotonic() - self.printed > EVERY:
            self.printed = time.monotonic()
            left = time.strftime("%H:%M:%S", time.gmtime(self.tail.seconds_remaining()))
            self.console.print(f"step {event.step:>5}/{self.plan.steps}  {figures}  {left} left", highlight=False)


class Bar(Lines):
    """A live bar."""

    def __enter__(self) -> "Bar":
        columns = ("{task.description}", "{task.completed:>5.0f}/{task.total:.0f}", "{task.fields[figures]}")
        name, count, figures = (TextColumn(column) for column in columns)
        options: dict[str, Any] = PLAIN | {"transient": False, "refresh_per_second": 4}
        self.bar = Progress(name, BarColumn(), count, figures, TimeRemainingColumn(), console=self.console, **options)
        self.task = self.bar.add_task("starting", total=self.plan.steps, completed=self.plan.start, figures="")
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, event: ProgressLine, figures: str) -> None:
        """Show a step."""
        self.bar.update(self.task, description="training", completed=event.step, figures=figures)


def watcher(plan: Plan, console: Console) -> Lines:
    """Return the bar on a terminal, lines elsewhere; with -v lines and Bridge's log."""
    verbose = os.environ.get(VERBOSE) == "1"
    return Bar(plan, console) if console.is_terminal and not verbose else Lines(plan, console, log=verbose)


def headed(console: Console, heading: Callable[[str, Plan], Text]) -> "Watch":
    """Print a heading before each training, then show its progress. heading: takes the training's name and plan."""

    @contextmanager
    def watch(name: str, plan: Plan) -> Iterator[Callable[[], None]]:
        console.print(heading(name, plan), soft_wrap=True)
        with watcher(plan, console) as tick:
            yield tick

    return watch


@contextmanager
def preparing(console: Console, *, here: bool = True, dry: bool = False) -> Iterator[Planning]:
    """How to plan: with a bar for preparing text."""
    with Counter(console) as counter:
        yield Planning(counter.reading(Path("the text")), here, dry)
