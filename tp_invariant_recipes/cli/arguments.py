"""Arguments that several commands share, and their shell completion."""

from pathlib import Path
from typing import Annotated

import typer

from tp_invariant_recipes.errors import ConfigError


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


def with_option(arguments: list[str], option: str, key: str, value: str | None) -> list[str]:
    """The overrides, and the one that an option stands for: KEY=VALUE.

    Raises ConfigError where the overrides say something else.
    """
    from tp_invariant_recipes.config.overrides import given, parse, parse_all

    if value is None:
        return arguments
    asked = parse(f"{key}={value}")
    other = given(parse_all(arguments), asked.field)
    if other is not None and other.value != asked.value:
        raise ConfigError(f"{option} {value} and {other.text} contradict each other; give one of them")
    return [*arguments, asked.text]


def with_cluster_file(arguments: list[str], file: Path | None) -> list[str]:
    """The overrides, and the one that `--cluster-file FILE` stands for. Raises ConfigError as `with_option`."""
    path = None if file is None else str(file.expanduser().absolute())
    return with_option(arguments, "--cluster-file", "cluster", path)
