"""The progress of a run or a benchmark: a live bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from tp_invariant_recipes.launch.plan import Plan, Planning
from tp_invariant_recipes.ledger.run_files import ProgressLine
from tp_invariant_recipes.plural import counted
from tp_invariant_recipes.reading import Record, checked, parse_json
from tp_invariant_recipes.start import start_clock

if TYPE_CHECKING:
    from tp_invariant_recipes.launch.local import Watch

WINDOW = 20  # steps over which tokens/s and the time left are averaged
# rich would otherwise take over standard output and error, and ranks forked meanwhile would write to the terminal.
PLAIN: dict[str, Any] = {"redirect_stdout": False, "redirect_stderr": False}
LINE_EVERY = 10.0  # seconds between plain lines, after the first steps


@dataclass
class Tail:
    """Reads the progress file as it grows.

    steps: the last step's number. kind: the fields of a line. position: where the next look starts.
    strange: the first line of another kind, and what is wrong with it. reported: whether the watcher has said so.
    """

    file: Path
    steps: int
    kind: type[Record] = ProgressLine
    position: int = 0
    events: list[Any] = field(default_factory=list)
    strange: str | None = None
    reported: bool = False

    def __post_init__(self) -> None:
        self.position = self.file.stat().st_size if self.file.exists() else 0  # an earlier attempt's steps are not news

    def new(self) -> list[Any]:
        """Return the steps recorded since the last call.

        Half a line at the end waits for its other half. One that never came, since a rank died or a disk was full,
        makes a line that is not JSON with what follows; it is passed over.
        """
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.position)
                data = stream.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.position += len(whole)
        fresh = []
        for line in whole.splitlines():
            with suppress(ValueError):
                event = parse_json(line, constants=True)
                try:
                    fresh.append(checked(self.kind, event))
                except ValueError as error:
                    self.strange = self.strange or f"{self.file}: a line of another kind is not shown: {error}"
        self.events = [*self.events, *fresh][-WINDOW:]
        return fresh

    def report_strange(self, console: Console) -> None:
        """Print `strange`, once."""
        if self.strange and not self.reported:
            self.reported = True
            console.print(Text(self.strange), soft_wrap=True)

    def tokens_per_second(self) -> float:
        """Over the last steps, without the first, which compiles and warms up."""
        timed = self.events[1:] or self.events
        seconds = sum(e.seconds for e in timed)
        return sum(e.tokens for e in timed) / seconds if seconds else 0.0

    def seconds_remaining(self) -> float:
        """Until the last step, at the pace of the last ones."""
        timed = self.events[1:] or self.events
        return (self.steps - self.events[-1].step) * sum(e.seconds for e in timed) / len(timed)


class Bar(Progress):
    """A live progress bar. Use as a context manager; call it to refresh."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.tail = Tail(plan.run_dir.progress, plan.steps)
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:>5.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
            **PLAIN,
        )
        self.task = self.add_task("starting", total=plan.steps, completed=plan.start, figures="")

    def __call__(self) -> None:
        """Show the steps that have been recorded since."""
        for event in self.tail.new():
            if event.start:
                self.console.print(Text(start_clock.text(event.start)), soft_wrap=True)
            self.update(self.task, description="training", completed=event.step, figures=_figures(event, self.tail))
        self.tail.report_strange(self.console)


class Lines:
    """Plain lines: the first steps, then one every few seconds, and the last."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.plan, self.console = plan, console
        self.tail = Tail(plan.run_dir.progress, plan.steps)
        self.printed = 0.0

    def __enter__(self) -> "Lines":
        ranks = counted(self.plan.layout.world, f"{self.plan.device} rank")
        phase(self.console, f"starting {ranks}")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self) -> None:
        """Print the steps that are due."""
        for event in self.tail.new():
            first = event.step - self.plan.start <= 3
            if first or event.step == self.plan.steps or time.monotonic() - self.printed > LINE_EVERY:
                self.printed = time.monotonic()
                remaining = time.strftime("%H:%M:%S", time.gmtime(self.tail.seconds_remaining()))
                step = f"step {event.step:>5}/{self.plan.steps}"
                self.console.print(f"{step}  {_figures(event, self.tail)}  {remaining} left", highlight=False)
            if event.start:
                self.console.print(Text(start_clock.text(event.start)), soft_wrap=True)
        self.tail.report_strange(self.console)


class Echo(Lines):
    """Plain lines between the lines of Bridge's log."""

    position = 0

    def __call__(self) -> None:
        """Print new lines of Bridge's log, then the steps that are due."""
        log = self.plan.run_dir.bridge_log
        if log.exists():
            with log.open("rb") as stream:
                stream.seek(self.position)
                text = stream.read()
            self.position += len(text)
            self.console.out(text.decode(errors="replace"), end="", highlight=False)
        super().__call__()


class Items(Progress):
    """Written items of a file, of a known number: a bar on a terminal, elsewhere a line every few seconds."""

    def __init__(self, doing: str, items: str, total: int, console: Console) -> None:
        self.items, self.total, self.printed = items, total, time.monotonic()
        super().__init__(
            TextColumn(doing),
            BarColumn(),
            TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {items}"),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            **PLAIN,
        )
        self.task = self.add_task("", total=total)

    def show(self, written: int, words: str = "") -> None:
        """Show how many are written. words: beside it."""
        self.update(self.task, completed=written, description=words)
        if not self.console.is_terminal and time.monotonic() - self.printed > LINE_EVERY:
            self.printed = time.monotonic()
            self.console.print(f"{written:,} of {self.total:,} {self.items}{', ' if words else ''}{words}")


def watcher(plan: Plan, console: Console, *, verbose: bool = False) -> Bar | Lines:
    """Return the bar on a terminal, lines elsewhere; with `verbose` also Bridge's log."""
    if verbose:
        return Echo(plan, console)
    return Bar(plan, console) if console.is_terminal else Lines(plan, console)


def headed(console: Console, heading: Callable[[str, Plan], Text], *, verbose: bool = False) -> "Watch":
    """Print a heading before each training, then show its progress. heading: takes the training's name and plan."""

    @contextmanager
    def watch(name: str, plan: Plan) -> Iterator[Callable[[], None]]:
        console.print(heading(name, plan), soft_wrap=True)
        with watcher(plan, console, verbose=verbose) as tick:
            yield tick

    return watch


def phase(console: Console, words: str) -> None:
    """Say, where there is no terminal, that something begins that takes seconds."""
    console.print(Text(f"{words} …"), soft_wrap=True)


@contextmanager
def busy(console: Console, words: str) -> Iterator[None]:
    """Return a spinner beside `words`, on a terminal; elsewhere a line."""
    if not console.is_terminal:
        phase(console, words)
        yield
        return
    with Progress(SpinnerColumn(), TextColumn(words), console=console, transient=True, **PLAIN) as progress:
        progress.add_task("")
        yield


@contextmanager
def preparing(console: Console, *, here: bool = True, dry: bool = False) -> Iterator[Planning]:
    """How to plan: with a bar for preparing text, shown from the first report on, elsewhere a line every LINE_EVERY
    seconds.
    """
    progress = Progress(
        TextColumn("preparing text"), BarColumn(), DownloadColumn(), console=console, transient=True, **PLAIN
    )
    task, printed = None, -LINE_EVERY

    def report(done: int, total: int) -> None:
        nonlocal task, printed
        if not console.is_terminal:
            if time.monotonic() - printed > LINE_EVERY:
                printed = time.monotonic()
                phase(console, f"preparing text: {done / 2**20:.0f} of {total / 2**20:.0f} MiB")
            return
        if task is None:
            task = progress.add_task("", total=total)
            progress.start()
        progress.update(task, completed=done)

    try:
        yield Planning(report, here, dry)
    finally:
        if task is not None:
            progress.stop()


def _figures(event: ProgressLine, tail: Tail) -> str:
    loss = "skipped" if event.loss is None else f"loss {event.loss:.4f}"
    return f"{loss}  {tail.tokens_per_second():,.0f} tokens/s"
