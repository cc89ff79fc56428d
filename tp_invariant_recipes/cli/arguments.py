# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands share, and their help."""

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tp_invariant_recipes.start.bridge import VERBOSE


def of_model(model: str | None) -> str | None:
    """Return a model as typed; `recipe=FILE.py:FUNCTION` with the whole path of the file. `weights=FOLDER` waits for
    `with_model`.
    """
    if model is None or not model.startswith("recipe="):
        return model
    from tp_invariant_recipes.sources import recipe_source

    return recipe_source.absolute(model)


def _show_output(verbose: bool) -> bool:
    if verbose:
        os.environ[VERBOSE] = "1"
    return verbose


def _trust(given: bool) -> bool:
    if given:
        from tp_invariant_recipes.launch import trust

        trust.trusted.append(True)
    return given


def argument(metavar: str, help: str, *, show_default: bool = False) -> Any:
    """Return a word of a command."""
    return typer.Argument(metavar=metavar, help=help, show_default=show_default)


def option(metavar: str | None, help: str, *names: str, **more: Any) -> Any:
    """Return an option with a value, named after its parameter unless `names` name it. more: as for typer."""
    return typer.Option(*names, metavar=metavar, help=help, **more)


def flag(help: str, *names: str) -> Any:
    """Return an option without a value."""
    return typer.Option(*names, help=help)


Model = Annotated[
    str,
    typer.Argument(
        help="A model of `tpi models`, or recipe=NAME.", metavar="MODEL", show_default=False, callback=of_model
    ),
]


def optional_model(unless: str) -> Any:
    """Return the MODEL of a command that needs none where an option says which. unless: "needed with --resume"."""
    help_ = f"A model of `tpi models`, or recipe=NAME; not {unless}."
    return typer.Argument(help=help_, metavar="MODEL", show_default=False, callback=of_model)


def directory_option(default: str) -> Any:
    """--dir of a command that writes a directory. default: its name below runs."""
    return option("DIR", f"Where to write; default runs/{default}.", "--dir")


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Short keys (tp pp dp cp ep etp sp seq mbs gbs iters lr seed save weights), groups (data=text "
        "numerics=stock device=cpu precision=fp32 …), or any field of Megatron-Bridge by its dotted path.",
        metavar="[KEY=VALUE]…",
        show_default=False,
    ),
]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Show the output of Megatron and the libraries.", callback=_show_output)
]
TrustRecipe = Annotated[
    bool,
    typer.Option(
        "--trust-recipe", help="Run the code that a folder of another user names, such as its recipe.", callback=_trust
    ),
]
Json = Annotated[bool, flag("Print JSON to standard output.", "--json")]

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Read overrides from this YAML file; those typed here win."),
]


def with_model[M: str | None](model: M, arguments: list[str]) -> tuple[M | str, list[str]]:
    """Return the model and the overrides; where `weights=FOLDER` stands in the model's place, the folder says which
    model.

    What the command line sets counts, by any key. Raises ConfigError: the folder holds no model that tpi knows.
    """
    if model is None or not model.startswith("weights="):
        return model, arguments
    from tp_invariant_recipes.config.overrides import changed, texts
    from tp_invariant_recipes.machine import terminal
    from tp_invariant_recipes.sources import hf_models, weights

    folder = Path(model.removeprefix("weights=")).expanduser().absolute()
    name, sizes = hf_models.model_of(weights.read(folder))
    terminal.console(stderr=True).print(f"{folder}: tpi {name} {' '.join(sizes)}", markup=False, soft_wrap=True)
    return name, [*texts(changed([*sizes, f"weights={folder}"], arguments))]


def resumed_words(model: str | None, arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the model and the overrides beside --resume: typer gives the first word to MODEL, also an override."""
    if model is None or "=" not in model or model.startswith("recipe="):
        return model, arguments
    return None, [model, *arguments]


def with_config[R](command: Callable[..., R]) -> Callable[..., R]:
    """Return a command with `--config FILE`, if it takes overrides. Typed words win over the file's keys."""
    signature = inspect.signature(command)
    if "overrides" not in signature.parameters:
        return command

    @functools.wraps(command)
    def with_file(config: Path | None, **arguments: Any) -> R:
        if config is not None:
            from tp_invariant_recipes.config.overrides import changed, texts, words_of_file

            model, typed = arguments.get("model"), arguments["overrides"] or []
            first = [model] if model and "=" in model and not model.startswith(("recipe=", "weights=")) else []
            kept = texts(changed(words_of_file(config), [*first, *typed]))
            arguments["overrides"] = [*kept[: len(kept) - len([*first, *typed])], *typed]
        return command(**arguments)

    more = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile)
    with_file.__signature__ = signature.replace(parameters=[*signature.parameters.values(), more])  # type: ignore[attr-defined]
    with_file.__annotations__ = {**command.__annotations__, "config": ConfigFile}
    return with_file


def help_text(command: Callable[..., Any]) -> str:
    """Return the docstring of a command with each paragraph on one line: typer would keep breaks that 80 columns break
    again.

    A paragraph that begins with a line of `\\b` keeps its line breaks: examples.
    """
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    # The mark alone on its line would be an empty line.
    return "\n\n".join("\b" + p[2:] if p.startswith("\b\n") else " ".join(p.split()) for p in paragraphs)
