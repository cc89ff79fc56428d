"""The progress of a benchmark: a live bar on a terminal, a line for each pass elsewhere."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from tp_invariant_recipes.launch.progress import PLAIN, Tail
from tp_invariant_recipes.runs.bench_dir import BenchDir, Figures, Pass


class Passes(Progress):
    """Shows the running pass and the completed steps of all passes. Use it as a context manager; call it to refresh."""

    def __init__(self, bench_dir: BenchDir, passes: tuple[Pass, ...], console: Console) -> None:
        self.passes = passes
        self.rounds = max(one.round for one in passes)
        self.current: int | None = None
        total = sum(one.steps for one in passes)
        self.tail = Tail(bench_dir.figures(0), total, Figures)
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
            console=console,
            refresh_per_second=4,
            disable=not console.is_terminal,
            transient=True,
            **PLAIN,
        )
        self.task = self.add_task("starting", total=total)

    def __call__(self) -> None:
        """Show the steps since the last call."""
        for event in self.tail.new():
            self._show(event)
        self.tail.report_strange(self.console)

    def _show(self, event: Figures) -> None:
        words = self._words(self.passes[event.pass_])
        if event.pass_ != self.current and not self.console.is_terminal:
            self.console.print(words)
        self.current = event.pass_
        self.update(self.task, description=words, advance=1)

    def _words(self, one: Pass) -> str:
        return f"profile, {one.mode}" if one.profile else f"round {one.round} of {self.rounds}, {one.mode}"
