# SPDX-License-Identifier: Apache-2.0
"""`tpi show` and `tpi models`."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tp_invariant_recipes.cli.arguments import (
    Json,
    Overrides,
    TrustRecipe,
    flag,
    of_model,
    option,
    optional_model,
    with_model,
)
from tp_invariant_recipes.errors import ConfigError, listed
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.settings import conf_files, field_table
from tp_invariant_recipes.settings.keys import nearest
from tp_invariant_recipes.text import single_line

if TYPE_CHECKING:
    from tp_invariant_recipes.config.overrides import Override


def models(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The model to describe.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """List the models; with a name, its tp degrees and memory.

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


Sections = Mapping[str, Any]
NOT_SET = "not set"
TWO = "--diff takes two: run directories, models, or a model with overrides in quotes"


def show(
    model: Annotated[str | None, optional_model("with --from")] = None,
    overrides: Overrides = None,
    run: Annotated[
        Path | None,
        option(
            "RUN", "The configuration of this run directory; with overrides, what --resume RUN makes of them.", "--from"
        ),
    ] = None,
    diff: Annotated[
        bool,
        flag(
            "The keys that differ between two, A and B: run directories, models, or a model with overrides in "
            "quotes. With one recipe=NAME alone: the fields of the recipe that the run changes.",
            "--diff",
        ),
    ] = False,
    fix: Annotated[
        bool, flag("Print the command of `tpi train` with every key that numerics=tree needs.", "--fix")
    ] = False,
    everything: Annotated[
        bool, flag("Print every key, the memory part by part, and the overrides for Megatron-Bridge.", "--all")
    ] = False,
    _trusted: TrustRecipe = False,
    as_json: Json = False,
) -> None:
    """Print the plan of a run: layout, batch, numerics, memory.

    The memory is an estimate for the rank that needs most (docs/memory.md). With --diff, overrides apply to both. Exit
    status of --diff: 0 no key differs, 1 one does.

    \b
    tpi show qwen3_8b tp=4
    tpi show qwen3_8b tp=4 --all
    tpi show --from runs/qwen3_8b-tp4-… --json | jq .configuration.optimizer
    tpi show --diff qwen3_8b "qwen3_8b tp=4 lr=1e-4"
    tpi show recipe=qwen3_8b_pretrain_config tp=4 --diff
    tpi show recipe=qwen3_8b_pretrain_config tp=4 --fix
    """
    from tp_invariant_recipes.config.overrides import parse_all

    arguments = list(overrides or [])
    if model is not None and (diff or (run and "=" in model)):  # typer gives the first word to MODEL
        arguments.insert(0, model)
        model = None
    if [model is not None, run is not None, diff].count(True) != 1:
        raise ConfigError("name one: a model (tpi models lists them), --from RUN, or --diff A B")
    if fix:
        _print_fixed(model, arguments)
        return
    if diff:
        raise typer.Exit(_diff(arguments, as_json=as_json))
    if run is None:
        model, arguments = with_model(model, arguments)
    requested = parse_all(arguments)
    sections = _run_sections(run.expanduser(), requested) if run is not None else _composed(str(model), requested)
    _print(sections, as_json=as_json, everything=everything)


def _print_fixed(model: str | None, overrides: list[str]) -> None:
    """Print the command that trains a model. Raises ConfigError: there is no model, or no key solves a problem."""
    from tp_invariant_recipes.features import recipe_fix
    from tp_invariant_recipes.launch.plan import detect_device

    if model is None:
        raise ConfigError("--fix goes with a model or a recipe: tpi show recipe=NAME --fix")
    given, unsolved, _ = recipe_fix.fixed(model, overrides, detect_device())
    if unsolved:
        raise ConfigError(
            f"{listed(unsolved)}\n--fix knows no key for {'this' if len(unsolved) == 1 else 'these'}", unsolved
        )
    terminal.print_text(shlex.join(["tpi", "train", model, *given]))
    if examples := [key for key in given if key in recipe_fix.PLACEHOLDERS.values()]:
        terminal.console_of_its_own().print(f"replace by your own: {' '.join(examples)}", markup=False)


def _composed(model: str, overrides: "list[Override]") -> Sections:
    from tp_invariant_recipes.config.compose import compose
    from tp_invariant_recipes.launch.plan import detect_device

    return compose(model, overrides, device=detect_device()).config.sections


def _run_sections(run: Path, overrides: "list[Override]") -> Sections:
    """Return a run's recorded configuration; with overrides, the one that --resume would compose. Raises a TpiError."""
    from tp_invariant_recipes.launch.record import RunRequest
    from tp_invariant_recipes.runs.run_dir import RunDir

    if overrides:
        return RunRequest(None, tuple(overrides), run).composed().config.sections
    with _config_errors():
        return json.loads(json.dumps(RunDir(run).read_config(), default=str))  # YAML has dates


@contextmanager
def _config_errors() -> Iterator[None]:
    """Raise ConfigError where a run's configuration lacks a field that this version needs, or is forged."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        text = f"this run's configuration is not one of this version of tpi ({type(error).__name__}: {error})"
        raise ConfigError(text) from error


def _diff(arguments: list[str], *, as_json: bool) -> int:
    """Print the keys that differ. Returns the exit status. Raises ConfigError."""
    from tp_invariant_recipes.config.overrides import parse_all
    from tp_invariant_recipes.settings.values import value_text

    pair = [word for word in arguments if not re.match(r"(?!recipe=)[+~]*[\w.]+=", word)]  # the others are overrides
    overrides = parse_all(word for word in arguments if word not in pair)
    reasons: dict[str, str] = {}
    if len(pair) == 1 and pair[0].startswith("recipe="):
        from tp_invariant_recipes.settings.sections import OWN_KEYS
        from tp_invariant_recipes.sources import recipe_layer

        run = _sections_of(pair[0], overrides)
        question = (f"recipe={run['recipe']['name']}", run["recipe"]["hf_folder"], run["data"]["kind"] == "text")
        sections = recipe_layer.read_recipe(*question).own
        own = {path.partition(".")[2]: run["tokenizer"][path.partition(".")[2]] for path in OWN_KEYS}
        both = [{**run, **sections, "tokenizer": own | sections["tokenizer"]}, run]
        for line in reversed(both[1]["recipe"].get("adjusted", ())):  # "KEY: …: REASON"
            reasons[line.partition(": ")[0]] = f": {line.rpartition(': ')[2]}"
        pair = [pair[0], "the run"]
    elif len(pair) == 2:
        both = [_sections_of(text, overrides) for text in pair]
    else:
        raise ConfigError(TWO)
    with _config_errors():
        changed = _differences(*both)
    if as_json:
        terminal.print_json({"a": pair[0], "b": pair[1], "different": changed}, indent=2)
        return 1 if changed else 0
    for item in changed:
        key, *values = (item[name] for name in ("key", "a", "b"))
        was, is_ = (NOT_SET if value is NOT_SET else value_text(value) for value in values)
        mark = " " if item["comparable"] else "*"
        terminal.print_text(f"{mark} {single_line(f'{key}: {was} -> {is_}{reasons.get(key, str())}')}")
    if not changed:
        terminal.print_text("no key differs")
    if not all(item["comparable"] for item in changed):
        terminal.print_text("* runs that differ there are not comparable")
    return 1 if changed else 0


def _sections_of(text: str, overrides: "list[Override]") -> Sections:
    """Return the configuration of a run directory, or of a model with its overrides. Raises a TpiError."""
    from tp_invariant_recipes.config.overrides import parse_all

    path = Path(text).expanduser()
    if not text.startswith("recipe=") and ("/" in text or (path / "run.json").exists()):
        return _run_sections(path, overrides)
    try:
        model, *words = shlex.split(text)
    except ValueError as error:  # a quote without its end, or no word
        raise ConfigError(f"{TWO}; {text!r}: {error}") from None
    return _composed(str(of_model(model)), [*parse_all(words), *overrides])


def _differences(a: Sections, b: Sections) -> list[dict[str, Any]]:
    """Return the keys at which two configurations differ, in the order of the first, as --json prints them.

    comparable: whether runs that differ there are comparable.
    """
    from tp_invariant_recipes.config.fingerprint import fingerprint, flat
    from tp_invariant_recipes.settings.run_config import RunConfig

    flats = flat(a), flat(b)
    identities = fingerprint(RunConfig(a), None), fingerprint(RunConfig(b), None)
    decisive = {key for key in (*identities[0], *identities[1]) if identities[0].get(key) != identities[1].get(key)}
    changed = []
    for key in dict.fromkeys((*flats[0], *flats[1])):
        in_a, in_b = (values.get(key, NOT_SET) for values in flats)
        if (in_a, type(in_a)) != (in_b, type(in_b)):
            same = not any(key == other or other.startswith(f"{key}.") for other in decisive)
            changed.append({"key": key, "a": in_a, "b": in_b, "comparable": same})
    return changed


def _brief(config: Any, rank: int) -> str:
    """Return the short keys and groups of a run, and its memory."""
    from tp_invariant_recipes.config.fingerprint import flat
    from tp_invariant_recipes.config.overrides import DECIDED_BY
    from tp_invariant_recipes.settings.keys import SHORT_KEYS
    from tp_invariant_recipes.settings.values import value_text

    values = flat(config.sections)
    keys = {name: values.get(key.path) for name, key in SHORT_KEYS.items()}
    groups = {group: values.get(f"{group}.{field}") for group, field in DECIDED_BY.items()}
    precision = config.mixed_precision
    groups |= {"mixed_precision": precision if isinstance(precision, str | None) else "(fields)"}
    lines = [" ".join(f"{k}={value_text(v)}" for k, v in row.items() if v is not None) for row in (keys, groups)]
    lines.append(f"numerics.virtual_shards={value_text(values.get('numerics.virtual_shards'))}")
    lines.append(f"memory of the fullest rank, about: {rank / 2**30:.1f} GiB")
    return "\n".join([*lines, "more: --all prints every key and the memory part by part"])


def _print(sections: Sections, *, as_json: bool, everything: bool) -> None:
    from tp_invariant_recipes.config import describe
    from tp_invariant_recipes.settings.run_config import RunConfig
    from tp_invariant_recipes.sizing import memory
    from tp_invariant_recipes.sizing.available_memory import as_dict, table

    with _config_errors():
        config = RunConfig(sections)
        need = memory.estimate(config)
        lines = describe.bridge_overrides(config)
    if as_json:
        shown = {"configuration": sections, "bridge_overrides": lines, "memory": as_dict(need)}
        terminal.print_json(shown, indent=2)
        return
    if not everything:
        terminal.print_text(_brief(config, need.rank))
        return
    import yaml

    terminal.print_text(yaml.safe_dump(dict(sections), sort_keys=False), end="")
    terminal.print_text("\n# Memory of the fullest rank, about (docs/memory.md)")
    terminal.print_text("\n".join(f"#   {line}" for line in table(need)))
    terminal.print_text("\n# Megatron-Bridge overrides")
    terminal.print_text("\n".join(lines))
