"""`tpi show` and `tpi models`."""

from rich.table import Column, Table

from tp_invariant_recipes.cli.arguments import Json, Model, Overrides
from tp_invariant_recipes.host import terminal


def show(model: Model, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print a run's configuration and memory, also for Bridge.

    The memory is an estimate for the fullest rank, part by part (docs/memory.md).

    \b
    tpi show qwen3_8b tp=4
    tpi show qwen3_8b tp=4 --json
    """
    import yaml

    from tp_invariant_recipes.config import describe, memory
    from tp_invariant_recipes.config.compose import compose
    from tp_invariant_recipes.launch.memory import as_dict, table
    from tp_invariant_recipes.launch.plan import detect_device

    composed = compose(model, list(overrides or []), device=detect_device())
    need = memory.estimate(composed.config)
    lines = describe.bridge_overrides(composed.tree)
    if as_json:
        shown = {"configuration": composed.tree, "bridge_overrides": lines, "memory": as_dict(need)}
        terminal.print_json(shown, indent=2)
        return
    terminal.print_text(yaml.safe_dump(composed.tree, sort_keys=False), end="")
    terminal.print_text("\n# Memory of the fullest rank, about (docs/memory.md)")
    terminal.print_text("\n".join(f"#   {line}" for line in table(need)))
    terminal.print_text("\n# Megatron-Bridge overrides")
    terminal.print_text("\n".join(lines))


def models(as_json: Json = False) -> None:
    """List the models: sizes, degrees of tp that fit, memory."""
    from tp_invariant_recipes.config import describe
    from tp_invariant_recipes.config.memory import GIB

    rows = describe.models()
    if as_json:
        terminal.print_json(rows, indent=2)
        return
    grid = Table(*(Column(name, no_wrap=True) for name in ("model", "parameters", "tp", "GiB a rank")), "what it is")
    for row in rows:
        grid.add_row(
            row["model"],
            f"{row['parameters'] / 1e9:.2f} B" if row["parameters"] >= 1e8 else f"{row['parameters'] / 1e6:.1f} M",
            " ".join(map(str, row["tp"])),
            " ".join(f"{size / GIB:.0f}" for size in row["memory"]),
            row["summary"] if row["cpu"] else f"{row['summary']} GPUs only.",
        )
    terminal.console().print(grid)
    terminal.print_text(
        "GiB a rank: on a GPU, for each tp, about; tpi show MODEL says of what. Train one: tpi train MODEL tp=2"
    )
