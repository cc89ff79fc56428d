"""`tpi show` and `tpi models`."""

import json

import typer
from rich.console import Console
from rich.table import Column, Table

from tp_invariant_recipes.cli.arguments import Json, Model, Overrides


def show(model: Model, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print a run's configuration, also as Megatron-Bridge's overrides.

    \b
    tpi show qwen3_8b tp=4
    tpi show qwen3_8b tp=4 --json
    """
    import yaml

    from tp_invariant_recipes.config import describe
    from tp_invariant_recipes.config.compose import compose
    from tp_invariant_recipes.launch.plan import detect_device

    tree = compose(model, list(overrides or []), device=detect_device()).tree
    lines = describe.bridge_overrides(tree)
    if as_json:
        print(json.dumps({"configuration": tree, "bridge_overrides": lines}, indent=2))
        return
    print(yaml.safe_dump(tree, sort_keys=False), end="")
    print("\n# Megatron-Bridge overrides")
    print("\n".join(lines))


def models(as_json: Json = False) -> None:
    """List the models, their sizes, and the tp degrees that fit."""
    from tp_invariant_recipes.config import describe

    rows = describe.models()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(
        *(Column(name, no_wrap=True) for name in ("model", "parameters", "layers", "tp", "device")), "what it is"
    )
    for row in rows:
        table.add_row(
            row["model"],
            f"{row['parameters'] / 1e9:.2f} B" if row["parameters"] >= 1e8 else f"{row['parameters'] / 1e6:.1f} M",
            str(row["layers"]),
            " ".join(map(str, row["tp"])),
            "cpu, gpu" if row["cpu"] else "gpu",
            row["summary"],
        )
    Console().print(table)
    typer.echo("train one: tpi train MODEL tp=2")
