"""`tpi show` and `tpi models`."""

from rich.table import Column, Table

from tp_invariant_recipes.cli.arguments import Json, Model, Overrides
from tp_invariant_recipes.host import terminal


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
        terminal.print_json({"configuration": tree, "bridge_overrides": lines}, indent=2)
        return
    terminal.print_text(yaml.safe_dump(tree, sort_keys=False), end="")
    terminal.print_text("\n# Megatron-Bridge overrides")
    terminal.print_text("\n".join(lines))


def models(as_json: Json = False) -> None:
    """List the models, their sizes, and the tp degrees that fit."""
    from tp_invariant_recipes.config import describe

    rows = describe.models()
    if as_json:
        terminal.print_json(rows, indent=2)
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
    terminal.console().print(table)
    terminal.print_text("train one: tpi train MODEL tp=2")
