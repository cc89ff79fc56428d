"""Compose `conf/` and the command line's overrides into a RunConfig, with every mistake in one message."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tp_invariant_recipes.config import bounds, graph_choice, hang_timeout, hydra_tree, lookup, recording, relations
from tp_invariant_recipes.config import (
    overrides as read,
)
from tp_invariant_recipes.config.overrides import Override, given, parse, parse_all
from tp_invariant_recipes.coverage import adjusted, guard, invariance
from tp_invariant_recipes.errors import ConfigError, listed, refuse
from tp_invariant_recipes.settings import (
    conf_files,
    cuda_graphs,
    environment,
    field_table,
    keys,
    layout,
    low_precision,
    peft,
    schema,
    secrets,
)
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.settings.nearest import nearest
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.sections import OWN_SECTIONS, PATHS
from tp_invariant_recipes.settings.values import WrongType, convert
from tp_invariant_recipes.sources import (
    finetuning,
    lora,
    recipe_answers,
    recipe_layer,
    recipe_process,
    recipe_source,
    weights,
)

OF_BRIDGE = schema.SECTIONS - OWN_SECTIONS.keys()

# Groups that a recipe decides unless the command line names an option.
RECIPES_OWN = ("precision", "data", "logging", "cuda_graph", "peft")

# To YAML 4:00:00 is 14400 and 010 is 8, so that text made of the value need not be what was written.
UNQUOTED = "expected text; in a file, write it in quotes"


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
    if recipe_source.is_recipe(model):
        model = recipe_source.absolute(model) or model
        with suppress(ConfigError):  # `_compose` lists it with the other problems
            if recipe_process.forks():
                recipe_answers.prepare(model, *_question(model, parse_all(overrides)))
    return recipe_process.run(model, lambda: _compose(model, overrides, device, numerics, also))


def _compose(
    model: str,
    overrides: Sequence[str | Override],
    device: str | None,
    numerics: str | None,
    also: Callable[[RunConfig], list[str]] | None,
) -> Composed:
    """As `compose`, in a process that may call the recipe."""
    groups = conf_files.groups()
    problems = conf_files.problems()
    requested = parse_all(overrides)
    known = model in groups["model"]
    if recipe_source.is_recipe(model):
        known = _readable(model, requested, problems)
    elif not known:
        first = f"; the model comes first: MODEL {model}" if "=" in model else nearest(model, groups["model"])
        problems.append(f"unknown model '{model}'{first or '; tpi models lists all'}")
    problems += _of_recipes(model, requested)
    # A faulty override is reported and left out, so that what is wrong beside it is found in the same breath.
    sound = _sound(requested, groups, problems)
    defaults = {"device": device, "numerics": numerics}
    sound += [
        parse(f"{group}={option}")
        for group, option in defaults.items()
        if option is not None and not any(o.path == group for o in sound)
    ]
    if known:
        sections = _checked(model, sound, problems)
        with _guarded(model, problems):
            config = _adjusted(model, sound, RunConfig(sections))
            problems += _broken_rules(config)
            problems += also(config) if also else []
    refuse(problems)
    chosen = None
    if graph_choice.decides(sound, recipe=recipe_source.is_recipe(model)):
        config, chosen = _with_graphs(model, sound, config)
    return Composed(model, tuple(requested), config, chosen)


def _broken_rules(config: RunConfig) -> list[str]:
    rules = (
        layout,
        relations,
        invariance,
        cuda_graphs,
        low_precision,
        recording,
        guard,
        hang_timeout,
        environment,
        secrets,
        recipe_layer,
        finetuning,
        lora,
        weights,
    )
    return [problem for rule in rules for problem in rule.problems(config)]


def _with_graphs(model: str, sound: Sequence[Override], eager: RunConfig) -> tuple[RunConfig, str]:
    """The run with the first kind of CUDA graphs that it allows, and which that is."""
    why = graph_choice.why_eager(eager)
    if why is None:
        others = [one for one in sound if one.path != graph_choice.GROUP]
        for option in graph_choice.OPTIONS:
            wrong: list[str] = []
            with suppress(ConfigError):  # which has its problems in `wrong` already
                chosen = [*others, parse(f"{graph_choice.GROUP}={option}")]
                config = _adjusted(model, chosen, RunConfig(_checked(model, chosen, wrong)))
                wrong += [*_broken_rules(config), *graph_choice.beyond(config, option)]
                if not wrong:
                    return config, option
            why = next(iter(wrong), f"cuda_graph={option} cannot be composed")
    return eager, f"{graph_choice.OFF}: {why}"


def _adjusted(model: str, sound: Sequence[Override], config: RunConfig) -> RunConfig:
    """The run of a recipe with what the invariant numerics set otherwise (coverage/adjusted.py)."""
    if not (recipe_source.is_recipe(model) and config.numerics.invariant and config.numerics.adjust):
        return config
    said = _said(model, sound)
    typed = {path for one in sound for path in _types(one)}
    config, lines = adjusted.adjust(config, typed, said.variables, said.preset)
    return RunConfig({**config.sections, "recipe": {**config.section("recipe"), "adjusted": lines}})


def _types(one: Override) -> tuple[str, ...]:
    """The paths that an override sets. A numerics' name leaves its other fields, such as V and C, as they are."""
    if one.group and one.path == "numerics":
        return ("numerics.mode",)
    option = hydra_tree.written(one.path, one.value) if one.group and one.path in RECIPES_OWN else {}
    return (one.path, *lookup.flat(option))


@contextmanager
def _guarded(model: str, problems: list[str]) -> Iterator[None]:
    """Adds a problem where a recipe lacks a field that the rules need."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if not recipe_source.is_recipe(model):
            raise
        problems.append(
            f"{model}: unsupported recipe: it lacks a field that tpi's rules need ({type(error).__name__}: {error}); "
            f"tpi does not cover this recipe"
        )


def _readable(model: str, overrides: Sequence[Override], problems: list[str]) -> bool:
    """Whether a recipe has a layer. Why it has none is added to `problems`."""
    try:
        _said(model, overrides)
    except ConfigError as error:
        problems += error.problems
        return False
    return True


def _said(model: str, overrides: Sequence[Override]) -> recipe_layer.Said:
    """What a recipe says: the lowest layer of the configuration, and more. Raises ConfigError."""
    return recipe_layer.said(*_question(model, overrides))


def _question(model: str, overrides: Sequence[Override]) -> tuple[str, str | None, bool]:
    """The arguments of `recipe_layer.said`. Raises ConfigError."""
    data = given(overrides, "data")
    return model, _hf_folder(overrides), data is not None and data.value == "text"


def _hf_folder(overrides: Sequence[Override]) -> str | None:
    """The absolute path of `recipe.hf_folder`. Raises ConfigError: there is no configuration."""
    requested = given(overrides, "recipe.hf_folder")
    if requested is None or requested.parsed is None or requested.sweep or requested.parsed.value() is None:
        return None
    folder = Path(str(requested.parsed.value())).expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{requested.text}: {'no config.json there' if folder.is_dir() else 'there is no such folder'}"
        )
    return str(folder)


def _of_recipes(model: str, overrides: Sequence[Override]) -> list[str]:
    """What is wrong with overrides that only a recipe has, or that tpi fills in."""
    requested = [one for one in overrides if one.path.startswith("recipe.") or one.path == adjusted.KEY]
    kinds = [one for one in overrides if one.path == "data.kind" and one.value == "recipe"]
    if kinds:
        return [f"{one.text}: a recipe with data of its own decides it; data=mock or data=text" for one in kinds]
    if not recipe_source.is_recipe(model):
        return [f"{one.text}: {model} is no recipe; recipe=NAME replaces the name of a model" for one in requested]
    filled = [one for one in requested if one.path not in ("recipe.hf_folder", adjusted.KEY)]
    return [f"{one.text}: tpi fills {one.path} in; leave it out" for one in filled]


def _checked(model: str, sound: Sequence[Override], problems: list[str]) -> dict[str, Any]:
    """The sections of those overrides whose numbers and types fit. What is wrong with others is added to `problems`.

    Raises ConfigError where files put into a section of Bridge's what no rule can judge.
    """
    sections = _hydra(model, sound, problems)
    by_default: set[str] = set()
    while wrong := _misfits(model, sections, sound, problems):
        problems += [problem for problem in wrong.values() if problem not in problems]
        left = [o for o in sound if o.path not in wrong]
        if len(left) < len(sound):
            sound = left
            sections = _hydra(model, sound, problems)
        elif by_default & wrong.keys() or any(path.partition(".")[0] in OF_BRIDGE for path in wrong):
            raise ConfigError(listed(problems), problems)
        else:
            _as_by_default(sections, wrong)
            by_default |= wrong.keys()
    return sections


def _misfits(
    model: str, sections: dict[str, Any], overrides: Sequence[Override], problems: list[str]
) -> dict[str, str]:
    """Path -> problem. Numbers first, which need no import, and again when texts have become numbers."""
    return (
        _out_of_range(sections, overrides)
        or _check_fields(sections, overrides) | _lost_precision(model, overrides, problems)
        or _out_of_range(sections, overrides)
    )


def _out_of_range(sections: dict[str, Any], overrides: Sequence[Override]) -> dict[str, str]:
    """Path -> problem of numbers; those that the user has set, if any: others may follow from them."""
    wrong = bounds.wrong(sections)
    return {o.path: wrong[o.path] for o in overrides if o.path in wrong} or wrong


def _sound(overrides: Sequence[Override], groups: dict[str, tuple[str, ...]], problems: list[str]) -> list[Override]:
    """The overrides that can be composed, values converted. What is wrong with the others is added to `problems`."""
    sound = []
    for override in _joined(overrides, problems):
        if problem := _problem(override, groups):
            problems.append(problem)
            continue
        try:
            sound.append(_converted(override))
        except WrongType as error:
            problems.append(f"{override.text}: {error}")
    return sound


def _joined(overrides: Sequence[Override], problems: list[str]) -> list[Override]:
    """The overrides without pairs of words such as `tp 2`, which are added to `problems`."""
    left = list(overrides)
    for key, value in itertools.pairwise(overrides):
        if key.parsed is None and "=" not in key.text + value.text and (names := _names(key.text)):
            problems.append(f"{key.text} {value.text}: write {names[0]}={value.text}")
            left = [one for one in left if one is not key and one is not value]
    return left


def _names(word: str) -> list[str]:
    """The keys of one word that a word may mean: short keys, groups, and fields of Bridge."""
    table = field_table.read()
    classes = schema.BRIDGE_SECTIONS | {"model": schema.PROVIDERS[0]}
    fields = [f"{section}.{word}" for section, path in classes.items() if word in table.get(path, ())]
    groups = [name for name in conf_files.group_names() if name == word.lower()]
    return [*(keys.meant(word) or groups or fields)]


def _problem(override: Override, groups: dict[str, tuple[str, ...]]) -> str | None:
    """Why an override cannot be composed, whatever its value's type."""
    text, key, parsed = override.text, override.key, override.parsed
    if parsed is None:
        shown = text if len(text) <= 200 else f"{text[:30]}…"
        return f"'{shown}' is not KEY=VALUE: {override.wrong}"
    if override.sweep:
        return f"{text}: one run takes one value for {key}; for several runs: tpi sweep, tpi verify"
    if parsed.is_delete():
        return f"{text}: fields cannot be deleted; set {key}=null"
    if override.given_file:
        try:
            hydra_tree.read(override.given_file)
        except ConfigError as error:
            return f"cluster={error}"
        return None
    if override.group:
        return _group_problem(key, override.value, groups)
    if any(key in (short.name, short.path) for short in SHORT_KEYS.values()):
        return None
    problem = _key_problem(key, groups)
    return f"{text}: {problem}" if problem else None


def _converted(override: Override) -> Override:
    """Convert the value of a short key: interpolations and rules build on it, and sp=off is no string.

    Raises WrongType.
    """
    short = next((key for key in SHORT_KEYS.values() if key.path == override.path), None)
    if short is None or override.parsed is None or short.path in PATHS:
        return override
    try:
        value = convert(override.parsed.value(), short.type)
    except WrongType as error:
        raise WrongType(f"{short.help}: {error}") from None
    return replace(override, value=str(value)) if isinstance(value, bool | int | float) else override


def _group_problem(key: str, option: str, groups: dict[str, tuple[str, ...]]) -> str | None:
    if key == "model":
        return f"model={option}: the model is the first argument: tpi train {option} …"
    if option in groups[key]:
        return None
    return f"{key}={option}: unknown {key} '{option}'{nearest(option, groups[key])}"


def _key_problem(key: str, groups: dict[str, tuple[str, ...]]) -> str | None:
    """What is wrong with a key that is not a short one, as far as it can be told without importing Bridge."""
    section = key.partition(".")[0]
    if key == "recipe":
        return "recipe=NAME replaces the name of a model: tpi train recipe=NAME …"
    if key == f"dataset.{schema.PROVIDER}":
        return "a recipe decides what its dataset is; leave it out"
    if section not in schema.SECTIONS:
        known = (*SHORT_KEYS, *groups) if section == key else (f"{s}.{key.partition('.')[2]}" for s in schema.SECTIONS)
        names = _names(key)
        hint = f"; did you mean '{"' or '".join(names)}'?" if names else nearest(key, known)
        return f"unknown key '{key}'{hint}"
    if section == key and section != "mixed_precision":
        return f"'{key}' is a section; set one of its fields, as in {key}.FIELD=VALUE"
    return None


def _hydra(model: str, overrides: Sequence[Override], problems: list[str]) -> dict[str, Any]:
    """What Hydra composes, every section a mapping. Raises ConfigError, with `problems`, when there is none."""
    file = next(iter(read.cluster_files(overrides)), None)
    arguments = [
        f"{'' if o.group else '++'}{o.path}={hydra_tree.GIVEN if o.given_file else o.value}" for o in overrides
    ]
    try:
        named = _named(file) if file else []
        if recipe_source.is_recipe(model):
            chosen = {override.path for override in overrides}
            base = [f"model={hydra_tree.GIVEN}", *(f"~{group}" for group in RECIPES_OWN if group not in chosen)]
            sections = hydra_tree.composed([*base, *named, *arguments], file, _said(model, overrides).text)
        else:
            sections = hydra_tree.composed([f"model={model}", *named, *arguments], file)
    except ConfigError as error:
        found = [*problems, *error.problems]
        raise ConfigError(listed(found), found) from error
    if sections.get(peft.SECTION, ()) is None:  # peft=none
        del sections[peft.SECTION]
    found = [f"{name}: a file puts a value where fields belong, as in {name}.FIELD" for name in _not_sections(sections)]
    if found:
        found = [*problems, *found]
        raise ConfigError(listed(found), found)
    if recipe_source.is_recipe(model):
        said = _said(model, overrides)
        sections["model"] = recipe_layer.without_defaults(sections["model"], said)
        typed = [one.path for one in overrides]
        sections["dataset"] = recipe_layer.without_ours(sections["dataset"], said, typed)
        sections["recipe"]["hf_folder"] = _hf_folder(overrides)
        sections["recipe"]["kept"] = [path for path in sections["recipe"]["kept"] if path not in typed]
    return sections


def _not_sections(sections: dict[str, Any]) -> list[str]:
    known = [name for name in sections if name in schema.SECTIONS and name != "mixed_precision"]
    # An override makes a section again of what a file has put there, but `config.yaml` holds all fields of these.
    whole = {name: schema.fields(OWN_SECTIONS[name]).keys() for name in ("cluster", "slurm")}
    return [
        name for name in known if not isinstance(sections[name], dict) or whole.get(name, set()) - sections[name].keys()
    ]


def _named(file: Path) -> list[str]:
    """The argument that names a cluster after its file, unless the file names it: else it has the name of its base."""
    written = hydra_tree.read(file)
    section = written.get("cluster", written)  # a file without "# @package _global_" holds the section's fields alone
    named = not isinstance(section, dict) or "name" in section
    return [] if named else [f"++cluster.name={read.quoted(file.stem)}"]


def _check_fields(sections: dict[str, Any], overrides: Iterable[Override]) -> dict[str, str]:
    """Path -> problem, in our sections and in those of Bridge's whose fields are known without importing it, or where
    the user set a field directly. Plain values get their type.

    The other sections are as files have them; they are checked when the container is built.
    """
    short = {key.path for key in SHORT_KEYS.values()}
    requested = [o.path.split(".") for o in overrides if not o.group and o.path not in short]
    wrong = {
        section: f"{section}: no such section{nearest(section, schema.SECTIONS)}"
        for section in sections
        if section not in schema.SECTIONS
    }
    wrong |= _wrong_short_keys(sections)
    table = field_table.read()
    for section in sorted(schema.SECTIONS & sections.keys()):
        if isinstance(sections[section], dict):
            names = [path[1] for path in requested if path[0] == section and len(path) > 1]
            values, problems = schema.check_section(section, sections, names, table)
            sections[section] |= {name: value for name, value in values.items() if type(value) in (bool, int, float)}
            wrong |= problems
    return _hinted(sections, wrong)


def _wrong_short_keys(sections: dict[str, Any]) -> dict[str, str]:
    """Path -> problem, where a file gives a field that has a short key a value of another type."""
    wrong = {}
    for key in SHORT_KEYS.values():
        section, _, name = key.path.partition(".")
        value = sections[section].get(name)
        try:
            convert(value, key.type)
        except WrongType as error:
            wrong[key.path] = f"{key.path}={value}: {error}"
    return wrong


def _hinted(sections: dict[str, Any], wrong: dict[str, str]) -> dict[str, str]:
    """These problems, with the usual correction where files mostly go wrong."""
    for path in [path for path in wrong if path.partition(".")[0] in OWN_SECTIONS]:
        section, _, name = path.partition(".")
        value = sections[section][name]
        if name in schema.SECTIONS:
            wrong[path] = f"{path}: a file with sections in it begins with the line '# @package _global_'"
        elif path == "cluster.environment" and isinstance(value, dict):
            # Without the values: one may be a secret.
            each = {f"{path}.{key}": f"{path}.{key}: {UNQUOTED}" for key, v in value.items() if type(v) is not str}
            wrong = {key: problem for key, problem in wrong.items() if key != path or not each} | each
        elif "expected str" in wrong[path] and isinstance(value, bool | int | float):
            wrong[path] = f"{path}={value}: {UNQUOTED}"
    return wrong


def _as_by_default(sections: dict[str, Any], wrong: Iterable[str]) -> None:
    """Put defaults where files hold a refused value, so that a later check finds the other problems, too."""
    for section, _, name in (path.partition(".") for path in wrong):
        if section not in OWN_SECTIONS:
            sections.pop(section)
        else:
            field, defaults = name.partition(".")[0], asdict(OWN_SECTIONS[section]())
            sections[section].pop(field)
            sections[section] |= {field: defaults[field]} if field in defaults else {}


def _lost_precision(model: str, overrides: Sequence[Override], problems: list[str]) -> dict[str, str]:
    """Path -> problem, where one field would replace the named recipe and all that its name stands for."""
    fields = [o for o in overrides if o.path.startswith("mixed_precision.")]
    name = _hydra(model, [o for o in overrides if o not in fields], problems)["mixed_precision"] if fields else None
    if not isinstance(name, str):
        return {}
    hint = "name another recipe, or set mixed_precision=null and then every field that counts"
    return {
        o.path: f"{o.text}: mixed_precision={name} is a preset; setting one field discards it; {hint}" for o in fields
    }
