"""`tpi bench`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from rich import box
from rich.table import Column, Table
from rich.text import Text

from tp_invariant_recipes.cli.arguments import Json, Model, Overrides, directory_option, flag, option
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.plural import counted
from tp_invariant_recipes.start import needed


def bench(
    model: Model,
    overrides: Overrides = None,
    modes: Annotated[
        str,
        option(
            None,
            "Numerics modes, separated by commas; tpi compares the others with the first. MODE+digests adds "
            "digests of all gradients and master weights, MODE+guard guard=products.",
        ),
    ] = "stock,tree",
    rounds: Annotated[int, option(None, "Rounds; every mode has one turn per round.")] = 2,
    warmup: Annotated[int, option(None, "Untimed warm-up steps per turn.")] = 5,
    steps: Annotated[int, option(None, "Timed steps per turn.")] = 15,
    profile: Annotated[
        bool, flag("Then trace two steps of each mode and list the kernels that take the extra time.", "--profile")
    ] = False,
    directory: Annotated[Path | None, directory_option("bench-MODEL-tpN-DATE-TIME")] = None,
    as_json: Json = False,
) -> None:
    """Measure step time, memory and tokens/s of numerics modes.

    The modes take turns on the same ranks. The tables show medians over the timed steps. Ratios are taken within a
    round and shown as their median, smallest and largest.

    \b
    tpi bench qwen3_8b tp=4
    tpi bench qwen3_8b tp=4 --modes tree,tree+digests,tree+guard
    tpi bench qwen3_toy tp=2 seq=64 --rounds 3 --profile
    """
    from tp_invariant_recipes.features.bench import workflow as launch
    from tp_invariant_recipes.features.train.workflow import check
    from tp_invariant_recipes.launch import progress

    needed.check("tpi bench", needed.TRAINING)
    console = terminal.console_of_its_own()
    with progress.preparing(console) as how:
        planned = launch.new(
            model,
            list(overrides or []),
            [mode.strip() for mode in modes.split(",") if mode.strip()],
            rounds=rounds,
            warmup=warmup,
            steps=steps,
            traced=profile,
            directory=directory,
            how=how,
        )
    with progress.busy(console, "importing Megatron-Bridge and checking the configurations"):
        for plan in planned.plans.values():
            check(plan)
    terminal.print_line(console, f"benchmark directory {planned.directory.path}")
    with progress.Passes(planned.directory, planned.passes, console) as watch:
        result = launch.execute(planned, watch)
    if as_json:
        terminal.print_json(result)
    else:
        _print(result)


def _print(result: dict[str, Any]) -> None:
    console = terminal.console()
    console.print(_title(result), soft_wrap=True)
    console.print(_figures(result["modes"]))
    console.print(f"host: {result['host_python_ms']:.0f} ms for a million additions in Python", highlight=False)
    if "profile" in result:
        traced = result["profile"]["modes"]
        console.print(_categories(traced))
        for line in _limits(traced):
            terminal.print_line(console, line)
        for mode in traced[1:]:
            console.print(_extra(traced[0]["mode"], mode, console.width))
        for mode in traced:
            console.print(f"trace of {mode['mode']}: {mode['trace']}", soft_wrap=True)


def _title(result: dict[str, Any]) -> str:
    ranks = counted(result["ranks"], f"{result['device']['kind']} rank")
    names = ", ".join(sorted(set(result["device"]["names"])))
    return (
        f"{' '.join([result['model'], *result['overrides']])} on {ranks} ({names}): "
        f"{counted(result['rounds'], 'round')} of {counted(result['steps'], 'step')} after {result['warmup']}"
    )


def _figures(modes: list[dict[str, Any]]) -> Table:
    memory, compared = modes[0]["peak_gib"] is not None, len(modes) > 1
    columns = [
        ("mode", [mode["mode"] for mode in modes]),
        *_spread("ms/step", [mode["step_ms"] for mode in modes], 1),
        ("tokens/s", [f"{mode['tokens_per_second']:,.0f}" for mode in modes]),
    ]
    if memory:
        columns.append(("GiB", [f"{mode['peak_gib']:.2f}" for mode in modes]))
    if compared:
        columns += _spread("× time", [mode["time_ratio"] for mode in modes], 3)
    if compared and memory:
        columns.append(_spread("× memory", [mode["memory_ratio"] for mode in modes], 3)[0])
    table = _table(*(title for title, _ in columns))
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*map(Text, row))
    table.caption = "\n".join(_figure_notes(modes[0], compared=compared)) or None
    return table


def _figure_notes(first: dict[str, Any], *, compared: bool) -> Iterator[str]:
    if compared:
        yield f"×: times {first['mode']}, the median of the rounds' ratios"
    if first["peak_gib"] is not None and first["memory"] == "reserved":
        yield "GiB: reserved by PyTorch, since a CUDA graph keeps memory that is not allocated"


def _spread(title: str, figures: list[dict[str, float] | None], digits: int) -> list[tuple[str, list[str]]]:
    """Two columns, each a title and its cells: the medians, and the ranges from smallest to largest."""
    medians = ["1" if figure is None else f"{figure['median']:.{digits}f}" for figure in figures]
    ends = ["" if figure is None else f"{figure['min']:.{digits}f}–{figure['max']:.{digits}f}" for figure in figures]
    return [(title, medians), ("min–max", ends)]


def _table(name: str, *numbers: str) -> Table:
    columns = [Column(title, justify="right", no_wrap=True) for title in numbers]
    return Table(
        Column(name, no_wrap=True), *columns, box=box.SIMPLE_HEAD, collapse_padding=True, caption_justify="left"
    )


def _categories(modes: list[dict[str, Any]]) -> Table:
    """Milliseconds and launches of a step by category, the longest in any mode first; then the whole step."""
    titles = [f"{modes[0]['mode']}\nms", "calls"]
    for mode in modes[1:]:
        titles += [f"{mode['mode']}\nms", "calls", "more\nms", "more\ncalls"]
    table = _table("a step on rank 0", *titles)
    names = {name: [mode["categories"].get(name) for mode in modes] for mode in modes for name in mode["categories"]}
    rows = {
        name: [(category["milliseconds"], category["launches"]) if category else (0.0, 0.0) for category in categories]
        for name, categories in names.items()
    }
    for name in sorted(rows, key=lambda name: -max(rows[name])[0]):
        table.add_row(Text(name), *_cells(rows[name]))
    table.add_section()
    table.add_row("sum", *_cells([(mode["milliseconds"], mode["launches"]) for mode in modes]))
    alone = _cells([(mode["milliseconds_without_collectives"], None) for mode in modes])
    table.add_row("sum without collectives", *alone)
    if all(mode["waiting_ms"] is not None for mode in modes):
        table.add_row("only collectives run", *_cells([(mode["waiting_ms"], None) for mode in modes]))
    table.add_row("nothing runs", *_cells([(mode["idle_ms"], None) for mode in modes]))
    table.add_row("traced step", *_cells([(mode["step_ms"], None) for mode in modes]))
    return table


def _limits(modes: list[dict[str, Any]]) -> list[str]:
    """Whether host or GPU limits each mode, and whether their ratio shows the cost of the modes."""
    limited = [mode for mode in modes if mode["limit"]]
    words = {"host": "the host limits it", "gpu": "the GPU limits it"}
    lines = [
        f"{mode['mode']}: the GPU idles in {mode['idle_share']:.0%} of the traced step: {words[mode['limit']]}"
        for mode in limited
    ]
    if len(modes) > 1 and any(mode["limit"] == "host" for mode in limited):
        lines.append("× time above compares hosts, too: it is not the cost of the method where the GPU is the limit")
    return lines


def _cells(modes: list[tuple[float, float | None]]) -> list[str]:
    """Milliseconds and launches of every mode; for modes after the first also the difference to the first."""
    (base_ms, base_launches), *others = modes
    cells = [f"{base_ms:.2f}", "" if base_launches is None else f"{base_launches:.0f}"]
    for ms, launches in others:
        more = "" if launches is None or base_launches is None else f"{launches - base_launches:+.0f}"
        cells += [f"{ms:.2f}", "" if launches is None else f"{launches:.0f}", f"{ms - base_ms:+.2f}", more]
    return cells


def _extra(first: str, mode: dict[str, Any], width: int) -> Table:
    """Return the kernels with the most extra time. width: characters of a line; names get the rest of it."""
    title = f"extra time of {mode['mode']} over {first}"
    table = Table(
        Column(title, no_wrap=True, overflow="ellipsis", max_width=max(width - 50, len(title) + 2)),
        Column("category", no_wrap=True),
        Column("more\nms", justify="right", no_wrap=True),
        Column("more\ncalls", justify="right", no_wrap=True),
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    for kernel in mode["extra"]:
        figures = f"{kernel['milliseconds']:+.3f}", f"{kernel['launches']:+.0f}"
        table.add_row(Text(_short(kernel["name"])), kernel["category"], *figures)
    return table


def _short(name: str) -> str:
    """Return a kernel's name without its uninformative parts; bench.json has the whole name."""
    return re.sub(r"^void |at::native::|\(anonymous namespace\)::|<unnamed>::|\([^()]*\)$", "", name)
