"""`tpi audit`."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Column, Table
from rich.text import Text

from tp_invariant_recipes.cli.arguments import Json, Model, Overrides, directory_option
from tp_invariant_recipes.host import needed, terminal
from tp_invariant_recipes.plural import counted

_COLOURS = {"same": "green", "equal": "green", "rounding": "green", "different": "red"}


def audit(
    model: Model,
    overrides: Overrides = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Compare another pair: the model as given, and with this override too. May be repeated.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each training; default 8. The same as iters=N.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the run directories even if nothing differs.")] = False,
    directory: Annotated[Path | None, directory_option("audit-MODEL-tpN-DATE-TIME")] = None,
    as_json: Json = False,
) -> None:
    """Compare the gradients of replayed CUDA graphs and eager code.

    tpi trains a few steps twice, from the same weights on the same data. One training replays graphs after the warm-up
    steps; the other delays their capture beyond the end. The table compares the gradient norms of all parameters before
    clipping, grouped by the parameters' purpose. If they are not equal to the last bit, a third training with rounded
    weights measures the effect of rounding. numerics=stock is the default here. Exit status: 0 equal but for rounding,
    1 different, 2 not known.

    \b
    tpi audit qwen3_8b cuda_graph=te
    tpi audit nemotron3_nano_toy cuda_graph=te gbs=4
    tpi audit qwen3_toy seq=64 --against model.recompute_granularity=selective
    """
    from tp_invariant_recipes.launch import progress
    from tp_invariant_recipes.workflows import audit as launch

    needed.check("tpi audit", needed.TRAINING)
    console = terminal.console_of_its_own()
    with progress.preparing(console) as report:
        planned = launch.new(
            model, list(overrides or []), against=against or (), steps=steps, directory=directory, progress=report
        )
    with progress.busy(console, "importing Megatron-Bridge and checking the configurations"):
        launch.check(planned)
    console.print(Text(f"audit directory {planned.directory.path}"), soft_wrap=True)
    watch = progress.headed(
        console, lambda name, run: Text(name, style="bold") + Text(f", {counted(run.steps, 'step')}")
    )
    found = launch.execute(planned, watch, keep=keep)
    if as_json:
        terminal.print_json(found)
    else:
        _print(found)
    raise typer.Exit(found["exit_status"])


def _print(found: dict[str, Any]) -> None:
    console = terminal.console()
    console.print(_table(found))
    line = Text(found["text"])
    line.stylize(f"bold {_COLOURS[found['verdict']]}", 0, len(found["verdict"]))
    console.print(line, soft_wrap=True)
    for group in found["groups"]:
        if group["state"] == "different":
            console.print(Text(_worst(group["name"], group["worst"])), soft_wrap=True)
    for sentence in found["remarks"]:
        console.print(Text(sentence, style="dim"), soft_wrap=True)


def _table(found: dict[str, Any]) -> Table:
    """80 characters wide."""
    numbers = ("params", found["pair"]["first"], found["pair"]["second"], "least", "median", "most", "allowed")
    table = Table(
        Column("group", no_wrap=True),
        *(Column(title, justify="right", no_wrap=True) for title in numbers),
        Column("", no_wrap=True),
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        caption="least, median, most: how many times the one norm the other is, over the parameters of a group",
        caption_justify="left",
    )
    for group in found["groups"]:
        ratios = (group[name] for name in ("low", "median", "high"))
        table.add_row(
            group["name"],
            str(group["parameters"]),
            *(f"{group[name]:.3g}" for name in ("first", "second")),
            *("–" if ratio is None else f"{ratio:.3g}" for ratio in ratios),
            "" if group["worst"]["allowed"] is None else f"±{100 * math.expm1(group['worst']['allowed']):.2g} %",
            Text(group["state"], style=_COLOURS[group["state"]]),
        )
    return table


def _worst(group: str, worst: dict[str, Any]) -> str:
    times = "" if worst["ratio"] is None else f", ×{worst['ratio']:.3g}"
    norms = f"{worst['first']:.3g} and {worst['second']:.3g}{times}"
    return f"{group}, furthest: {worst['name']} at step {worst['step']}: {norms}"
