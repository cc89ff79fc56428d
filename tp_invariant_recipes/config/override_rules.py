"""What may be typed: rules of one override, as far as they can be told without composing or importing Bridge."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tp_invariant_recipes.config import adjusted, hydra_tree
from tp_invariant_recipes.config.overrides import Override
from tp_invariant_recipes.errors import ConfigError, Problem, lines
from tp_invariant_recipes.settings import conf_files, schema
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.settings.nearest import did_you_mean, nearest
from tp_invariant_recipes.settings.sections import PATHS
from tp_invariant_recipes.settings.values import WrongType, convert
from tp_invariant_recipes.sources import recipe_source

type Groups = Mapping[str, tuple[str, ...]]  # Hydra's -> their options


def sound_overrides(model: str, overrides: Sequence[Override], problems: list[str]) -> list[Override]:
    """Return the overrides that can be composed, values converted.

    What is wrong with the others is added to `problems`, so that one message has what is wrong beside it, too.
    """
    groups = conf_files.groups()
    problems += lines(problem for override in overrides for problem in _decided_by_recipe(override, model))
    sound = []
    for override in _joined(overrides, problems):
        wrong = lines(_wrong(override, groups))
        problems += wrong
        if not wrong:
            sound.append(_converted(override))
    return sound


def _joined(overrides: Sequence[Override], problems: list[str]) -> list[Override]:
    """Return the overrides without pairs of words such as `tp 2`, which are added to `problems`."""
    single = list(overrides)
    for key, value in itertools.pairwise(overrides):
        if key.parsed is None and "=" not in key.text + value.text and (names := schema.keys_of(key.text)):
            problems.append(f"{key.text} {value.text}: write {names[0].partition('=')[0]}={value.text}")
            single = [override for override in single if override is not key and override is not value]
    return single


def _wrong(override: Override, groups: Groups) -> Iterator[Problem]:
    """Yield why an override cannot be composed."""
    text, key, parsed = override.text, override.key, override.parsed
    if parsed is None:
        shown = text if len(text) <= 200 else f"{text[:30]}…"
        yield Problem("", f"'{shown}' is not KEY=VALUE" + (f": {override.wrong}" if "=" in text else ""))
        return
    if override.sweep:
        yield Problem(text, f"one run takes one value for {key}", "for several layouts: tpi verify")
    if parsed.is_delete():
        yield Problem(text, "fields cannot be deleted", f"set {key}=null")
    if override.sweep or parsed.is_delete():
        return
    if override.group:
        yield from _wrong_option(override, groups)
    elif not any(key in (short.name, short.path) for short in SHORT_KEYS.values()):
        yield from _wrong_key(override, groups)
    try:
        _converted(override)
    except WrongType as error:
        yield Problem(text, str(error))


def _wrong_option(override: Override, groups: Groups) -> Iterator[Problem]:
    """Yield why a group has no such option, or why the cluster's file cannot be read."""
    key, option = override.key, override.value
    if override.given_file is not None:
        try:
            hydra_tree.read(override.given_file)
        except ConfigError as error:
            yield Problem("", f"cluster={error}")
    elif key == "model":
        yield Problem(f"model={option}", f"the model is the first argument: tpi train {option} …")
    elif option not in groups[key]:
        yield Problem(f"{key}={option}", f"unknown {key} '{option}'{nearest(option, groups[key])}")


def _wrong_key(override: Override, groups: Groups) -> Iterator[Problem]:
    """Yield what is wrong with a key that is not a short one, as far as it can be told without importing Bridge."""
    text, key = override.text, override.key
    section = key.partition(".")[0]
    if key == "recipe":
        yield Problem(text, "recipe=NAME replaces the name of a model: tpi train recipe=NAME …")
    elif key == f"dataset.{schema.PROVIDER}":
        yield Problem(text, "a recipe decides what its dataset is", "leave it out")
    elif section not in schema.SECTIONS:
        known = (*SHORT_KEYS, *groups) if section == key else (f"{s}.{key.partition('.')[2]}" for s in schema.SECTIONS)
        hint = did_you_mean(schema.keys_of(key) or schema.keys_of(key.rpartition(".")[2])) or nearest(key, known)
        yield Problem(text, f"unknown key '{key}'{hint}")
    elif section == key and section != "mixed_precision":
        yield Problem(text, f"'{key}' is a section", f"set one of its fields, as in {key}.FIELD=VALUE")


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


def _decided_by_recipe(override: Override, model: str) -> Iterator[Problem]:
    """Yield what only a recipe has, or what tpi fills in."""
    text, path = override.text, override.path
    if path == "data.kind" and override.value == "recipe":
        yield Problem(text, "a recipe with data of its own decides it", "data=mock or data=text")
    elif not (path.startswith("recipe.") or path == adjusted.KEY):
        return
    elif not recipe_source.is_recipe(model):
        yield Problem(text, f"{model} is no recipe", "recipe=NAME replaces the name of a model")
    elif path not in ("recipe.hf_folder", adjusted.KEY):
        yield Problem(text, f"tpi fills {path} in", "leave it out")
