# SPDX-License-Identifier: Apache-2.0
"""Compose `conf/` and the command line's overrides into a RunConfig, with every mistake in one message.

Words are read and judged, Hydra merges the files of their options once, and what has been typed is set there. A recipe
is adjusted, and every rule is asked.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tp_invariant_recipes.check import relations
from tp_invariant_recipes.check import typed as typed_rules
from tp_invariant_recipes.check.configuration import check
from tp_invariant_recipes.config import adjusted, graph_choice, hydra_tree
from tp_invariant_recipes.config.fingerprint import flat
from tp_invariant_recipes.config.override_rules import fitting_overrides, misfits, sound_overrides
from tp_invariant_recipes.config.overrides import (
    Override,
    cluster_files,
    hf_folder,
    of_two_keys,
    parse,
    parse_all,
    read_recipe,
)
from tp_invariant_recipes.errors import OR_STOCK, ConfigError, Problem, lines, listed, refuse
from tp_invariant_recipes.numerics.mode import STOCK
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import conf_files, field_table, finetuning, schema
from tp_invariant_recipes.settings.keys import SHORT_KEYS, nearest
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.sections import OWN_SECTIONS
from tp_invariant_recipes.settings.values import WrongType, convert
from tp_invariant_recipes.sizing import available_memory
from tp_invariant_recipes.sources import recipe_layer, recipe_process, recipe_source

OF_BRIDGE = schema.SECTIONS - OWN_SECTIONS.keys()
# Groups that a recipe decides unless the command line names an option.
RECIPES_OWN = ("precision", "data", "logging", "cuda_graph", "peft")


@dataclass(frozen=True)
class Composed:
    """A run as composed.

    model:     the model's name.
    overrides: as requested.
    config:    plain dicts and lists, interpolations resolved.
    graphs:    the option that cuda_graph=auto has become, and for off the reason; None: the run names one.
    """

    model: str
    overrides: tuple[Override, ...]
    config: RunConfig
    graphs: str | None = None


def compose(
    model: str,
    overrides: Sequence[str | Override] = (),
    *,
    device: str | None = None,
    numerics: str | None = None,
    also: Callable[[RunConfig], list[str]] | None = None,
) -> Composed:
    """Compose a run of `model`: one of ours, or `recipe=…` (sources/recipe_source.py), which imports Bridge.

    overrides: `key=value` with short keys, Hydra groups, or the dotted path of any field of Bridge's; `cluster=FILE` of
               YAML is a cluster that lies anywhere.
    device, numerics: the options of these groups where the overrides name none, such as "cpu" and "stock".
    also: lists what else is wrong with the configuration, such as files that are missing on this machine.
    Raises ConfigError listing every problem that can be found without building the model.
    """
    requested = parse_all(overrides)
    recipe: recipe_layer.RecipeAnswer | None = None
    unknown: Sequence[str] = ()
    if recipe_source.is_recipe(model):
        model = recipe_source.absolute(model) or model
        if not recipe_process.serves():
            recipe_layer.read_recipe.cache_clear()  # its file may have changed since
        try:
            recipe = read_recipe(model, requested)
        except ConfigError as error:
            unknown = error.problems
    elif model not in (models := conf_files.options("model")):
        first = f"; the model comes first: MODEL {model}" if "=" in model else nearest(model, models)
        unknown = [_folder(model) or f"unknown model '{model}'{first or '; tpi models lists all'}"]
    defaults = [parse(f"{group}={it}") for group, it in {"device": device, "numerics": numerics}.items() if it]
    problems = [*conf_files.problems(), *unknown, *of_two_keys(requested)]
    sound = sound_overrides(model, requested, problems)
    sound += [default for default in defaults if not any(o.path == default.path for o in sound)]
    if unknown:
        raise ConfigError(listed(problems), problems)
    composed, typed = _typed(model, sound, problems, recipe)
    try:
        eager = _adjusted(recipe, typed, composed)
        problems += lines(check(eager))
        paths = [override.path for override in typed]
        of_typed = (relations.unpadded, typed_rules.idle, typed_rules.unknown)
        problems += lines(replace(it, rule=rule.__name__) for rule in of_typed for it in rule(eager, paths))
        problems += also(eager) if also else []
        stock = {**composed.sections, "numerics": {"mode": STOCK, "initial_weights": "megatron"}}
        if OR_STOCK in problems and {*lines(check(RunConfig(stock)))} - {*problems}:
            problems.remove(OR_STOCK)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if recipe is None:
            raise
        problems.append(
            f"{model}: unsupported recipe: it lacks a field that tpi's rules need ({type(error).__name__}: {error}); "
            f"tpi does not cover this recipe"
        )
    refuse(problems)
    if not graph_choice.decides(typed, recipe=recipe is not None):
        return Composed(model, tuple(requested), eager)
    return Composed(model, tuple(requested), *_with_graphs(recipe, typed, composed, eager))


def _folder(model: str) -> str | None:
    """Say what takes a folder that was typed as a model; None: it is no run and has no weights."""
    if RunDir(Path(model)).run.is_file():
        return (
            f"{model} is a run, not a model: tpi report {model} shows it, tpi train --resume {model} continues it, "
            f"tpi show --from {model} prints its configuration"
        )
    weights = f"{model} is a folder of weights, not a model: type weights={model} in the model's place"
    return weights if (Path(model) / "config.json").is_file() else None


def _typed(
    model: str, sound: Sequence[Override], problems: list[str], recipe: recipe_layer.RecipeAnswer | None
) -> tuple[RunConfig, Sequence[Override]]:
    """Return the run with the values that fit their fields, and the overrides that do. Others are problems.

    Raises ConfigError where files put into a section of Bridge's what no rule can judge.
    """
    cluster = next(iter(cluster_files(sound)), None)
    try:
        tree = hydra_tree.merged(_options(model, sound, recipe), cluster, recipe.text if recipe else None)
        fields = recipe.fields if recipe else None
        own = {recipe.own["model"][schema.PROVIDER]: field_table.hints(fields)} if recipe and fields else {}
        fitting = fitting_overrides(hydra_tree.plain(tree), sound, problems, own)
        values = [*_cluster_name(cluster), *((o.path, o.data) for o in fitting if not o.group)]
        sections = hydra_tree.resolved(tree, values, cluster)
    except ConfigError as error:
        messages = [*problems, *error.problems]
        raise ConfigError(listed(messages), messages) from error
    if sections.get(finetuning.SECTION, ()) is None:  # peft=none
        del sections[finetuning.SECTION]
    why = "a file puts a value where fields belong, as in"
    if messages := [f"{name}: {why} {name}.FIELD" for name in _not_sections(sections)]:
        refuse([*problems, *messages])
    if recipe:
        typed = [override.path for override in fitting]
        # Fields of pretraining that a recipe leaves out go, and what its objects hold is noted.
        sections["dataset"] = recipe_layer.without_pretraining_fields(sections["dataset"], recipe, typed)
        sections["recipe"]["hf_folder"] = hf_folder(fitting)
        kept = [path for path in sections["recipe"]["kept"] if path not in typed]
        if "dataset" in kept and sections["data"]["kind"] != "recipe":  # data=mock
            kept.remove("dataset")
        elif "dataset" in kept and (lost := [path for path in typed if path.startswith("dataset.")]):
            raise ConfigError(f"{', '.join(lost)}: the recipe's dataset is an object of its own; set it there")
        sections["recipe"]["kept"] = kept
    wrong = _wrong_in_files(sections)
    problems += [line for line in lines(wrong.values()) if line not in problems]
    if any(path.partition(".")[0] in OF_BRIDGE for path in wrong):
        raise ConfigError(listed(problems), problems)
    # Defaults stand where files hold a refused value, so that the rules find the other problems, too.
    for section, _, name in (path.partition(".") for path in wrong):
        if section not in OWN_SECTIONS:
            sections.pop(section)
        else:
            field, defaults = name.partition(".")[0], asdict(OWN_SECTIONS[section]())
            sections[section].pop(field, None)
            sections[section] |= {field: defaults[field]} if field in defaults else {}
    return _completed(RunConfig(sections), recipe), fitting


def _options(model: str, overrides: Sequence[Override], recipe: recipe_layer.RecipeAnswer | None) -> list[str]:
    """Return the options of groups as Hydra takes them; a recipe has options of its own groups where they are typed."""
    chosen = {o.path: hydra_tree.GIVEN if o.given_file else o.value for o in overrides if o.group}
    left_out = [f"~{group}" for group in RECIPES_OWN if recipe and group not in chosen]
    chosen["model"] = hydra_tree.GIVEN if recipe else model
    return [*left_out, *(f"{group}={option}" for group, option in chosen.items())]


def _cluster_name(file: Any) -> list[tuple[str, str]]:
    """Return the value that names a cluster after its file, unless the file does: else it has the name of its base."""
    written = hydra_tree.read(file) if file else {}
    section = written.get("cluster", written)  # a file without "# @package _global_" holds the section's fields alone
    named = file is None or not isinstance(section, dict) or "name" in section
    return [] if named else [("cluster.name", file.stem)]


def _not_sections(sections: dict[str, Any]) -> list[str]:
    known = [name for name in sections if name in schema.SECTIONS and name != "mixed_precision"]
    # An override makes a section again of what a file has put there, but `config.yaml` holds all fields of these.
    whole = {name: schema.fields(OWN_SECTIONS[name]).keys() for name in ("cluster", "slurm")}
    return [
        name for name in known if not isinstance(sections[name], dict) or whole.get(name, set()) - sections[name].keys()
    ]


def _wrong_in_files(sections: dict[str, Any]) -> dict[str, Problem]:
    """Path -> problem of what files hold: no section, a value of another type, or out of its range."""
    wrong = {
        section: Problem(section, f"no such section{nearest(section, schema.SECTIONS)}")
        for section in sections
        if section not in schema.SECTIONS
    }
    for key in SHORT_KEYS.values():
        section, _, name = key.path.partition(".")
        value = sections[section].get(name)
        try:
            convert(value, key.type)
        except WrongType as error:
            wrong[key.path] = Problem(f"{key.path}={value}", str(error))
    return wrong | misfits(sections, {})


def _completed(config: RunConfig, recipe: recipe_layer.RecipeAnswer | None) -> RunConfig:
    """Return the run with the settings that follow others, and without what a recipe leaves to its model's class."""
    config = adjusted.complete(config)
    if recipe is None:
        return config
    return RunConfig({**config.sections, "model": recipe_layer.without_defaults(config.model, recipe)})


def _with_graphs(
    recipe: recipe_layer.RecipeAnswer | None, typed: Sequence[Override], composed: RunConfig, eager: RunConfig
) -> tuple[RunConfig, str]:
    """Return the run with the first kind of CUDA graphs that it allows, and which that is.

    composed: without graphs, as Hydra has it. eager: the same, adjusted.
    """
    why = graph_choice.eager_reason(eager)
    if why is None:
        refused: list[str] = []
        unwanted: list[str] = []
        decided = {path for override in typed if override.path != graph_choice.GROUP for path in _types(override)}
        for option in graph_choice.OPTIONS:
            captured = graph_choice.captured(composed, option, decided | hydra_tree.paths_in_files(typed))
            config = _adjusted(recipe, typed, _completed(captured, recipe))
            wrong = lines(check(config))
            beyond = graph_choice.beyond(config, option)
            if not wrong and not beyond:
                if (need := available_memory.tight(config, here=True)) is None:
                    return config, option
                why = why or f"memory is tight: with graphs this run needs {need}"
            unwanted += beyond
            refused += wrong
        # What solves a later problem may name an option that was refused before.
        why = why or next(iter([*refused, *reversed(unwanted)]), "no kind can be composed")
    return eager, f"{graph_choice.OFF}: {why}"


def _adjusted(recipe: recipe_layer.RecipeAnswer | None, typed: Sequence[Override], config: RunConfig) -> RunConfig:
    """Return the run of a recipe with what the invariant numerics set otherwise (config/adjusted.py)."""
    if recipe is None or not (config.numerics.invariant and config.numerics.adjust):
        return config
    paths = {path for override in typed for path in _types(override)}
    config, changes = adjusted.adjust(config, paths, recipe.variables, recipe.preset)
    return RunConfig({**config.sections, "recipe": {**config.section("recipe"), "adjusted": changes}})


def _types(override: Override) -> tuple[str, ...]:
    """Return the paths that an override sets.

    A numerics' name leaves its other fields, such as V and C, as they are.
    """
    if override.group and override.path == "numerics":
        return ("numerics.mode",)
    if not (override.group and override.path in RECIPES_OWN):
        return (override.path,)
    return (override.path, *flat(hydra_tree.written(override.path, override.value)))
