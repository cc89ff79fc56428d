"""Arguments that several commands share, and their shell completion."""

from pathlib import Path
from typing import Annotated

import typer


def _models(incomplete: str) -> list[tuple[str, str]]:
    from tp_invariant_recipes.config import source

    return [(m, source.summary("model", m)) for m in source.groups()["model"] if m.startswith(incomplete)]


def _overrides(incomplete: str) -> list[tuple[str, str]]:
    from tp_invariant_recipes.config import source
    from tp_invariant_recipes.config.keys import SHORT_KEYS

    short = [(f"{key.name}=", key.help) for key in SHORT_KEYS.values()]
    groups = [
        (f"{group}={option}", source.summary(group, option))
        for group, options in source.groups().items()
        for option in options
        if group != "model"
    ]
    return [(text, help_) for text, help_ in (*short, *groups) if text.startswith(incomplete)]


Model = Annotated[
    str, typer.Argument(help="A model of `tpi models`.", metavar="MODEL", autocompletion=_models, show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Short keys (tp pp dp cp ep etp sp seq mbs gbs iters lr seed save), groups (data=text numerics=stock "
        "device=cpu precision=fp32 logging=wandb …), or any field of Megatron-Bridge by its dotted path.",
        metavar="[KEY=VALUE]…",
        autocompletion=_overrides,
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]

ClusterFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Read the description of the cluster from this file. The same as cluster=FILE."),
]


def cluster_override(file: Path | None) -> list[str]:
    """`--cluster-file FILE` as the override it stands for."""
    return [] if file is None else [f"cluster={file.expanduser().absolute()}"]
