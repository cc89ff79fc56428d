"""`tpi models`."""

from typing import Annotated, Any

import typer

from tp_invariant_recipes.cli.arguments import Json
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.foreign_text import single_line
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.settings import conf_files
from tp_invariant_recipes.settings.keys import nearest
from tp_invariant_recipes.settings.tables import field_table


def models(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="What is known of this model.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """List the models; with a name, its degrees of tp and memory.

    \b
    tpi models
    tpi models qwen3_8b
    """
    rows = {row["model"]: row for row in [*field_table.rows(), *_own()]}
    if name is not None and name not in rows:
        raise ConfigError(f"unknown model '{name}'{nearest(name, rows) or '; tpi models lists all'}")
    if as_json:
        terminal.print_json([*rows.values()] if name is None else rows[name], indent=2)
    elif name is not None:
        terminal.print_text(_details(rows[name]))
    else:
        _print_list([*rows.values()])


def _own() -> list[dict[str, Any]]:
    """Return the rows of the models in the user's own tree, each composed."""
    own = [model for model in conf_files.groups()["model"] if conf_files.users_file("model", model)]
    if not own:
        return []
    from tp_invariant_recipes.config import describe  # imports Hydra

    return [describe.model(model) for model in own]


def _print_list(rows: list[dict[str, Any]]) -> None:
    """Print a line a model, whole unless a terminal is too narrow for it."""
    console = terminal.console()
    width = max(len(row["model"]) for row in rows)
    for row in rows:
        line = single_line(f"{row['model']:{width}}  {_count(row['parameters']):>8}  {row['summary']}")
        too_long = console.is_terminal and len(line) > console.width
        terminal.print_text(f"{line[: console.width - 1]}…" if too_long else line)
    terminal.print_text("\nMore of one: tpi models NAME. Train one: tpi train NAME tp=2")


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.1f} M"


def _details(row: dict[str, Any]) -> str:
    """One model: every figure that the table has, and how to train it."""
    name = row["model"]
    sizes = (f"tp={tp} {size / 2**30:.0f}" for tp, size in zip(row["tp"], row["memory"], strict=True))
    lines = {
        "parameters": _count(row["parameters"]),
        "layers": row["layers"],
        "hidden size": row["hidden_size"],
        "tp": " ".join(map(str, row["tp"])),
        "GiB a rank": f"{', '.join(sizes)} (of a GPU, about; tpi show {name} says of what)",
        "trains on": "CPUs and GPUs" if row["cpu"] else "GPUs",
        "train it": f"tpi train {name} tp={row['tp'][-1]}",
    }
    about = single_line(conf_files.description("model", name))
    return "\n".join([f"{name}: {about}", *(f"  {key:11}  {value}" for key, value in lines.items())])
