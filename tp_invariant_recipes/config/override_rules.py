"""What may be typed: rules of one override, as far as they can be told without composing or importing Bridge."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tp_invariant_recipes.check.rule import Rule, broken_rules
from tp_invariant_recipes.config import adjusted, hydra_tree
from tp_invariant_recipes.config.overrides import Override
from tp_invariant_recipes.errors import ConfigError, Problem, lines
from tp_invariant_recipes.settings import conf_files, schema
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.settings.nearest import did_you_mean, nearest
from tp_invariant_recipes.settings.sections import PATHS
from tp_invariant_recipes.settings.values import WrongType, convert
from tp_invariant_recipes.sources import recipe_source


@dataclass(frozen=True)
class Typed:
    """An override of a run. groups: Hydra's -> their options."""

    override: Override
    model: str
    groups: Mapping[str, tuple[str, ...]]

    @property
    def parsed(self) -> Any:
        """As Hydra reads it; None: it is no KEY=VALUE."""
        return self.override.parsed

    @property
    def single(self) -> bool:
        """Whether it sets one value."""
        return self.parsed is not None and not self.override.sweep and not self.parsed.is_delete()


def sound_overrides(model: str, overrides: Sequence[Override], problems: list[str]) -> list[Override]:
    """Return the overrides that can be composed, values converted.

    What is wrong with the others is added to `problems`.
    """
    groups = conf_files.groups()
    problems += lines(
        problem for override in overrides for problem in broken_rules(Typed(override, model, groups), OF_RECIPES)
    )
    sound = []
    for override in _joined(overrides, problems):
        broken = broken_rules(Typed(override, model, groups), RULES)
        problems += lines(broken)
        if not broken:
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


def _unread(typed: Typed) -> Problem:
    text = typed.override.text
    return Problem("", f"'{text if len(text) <= 200 else f'{text[:30]}…'}' is not KEY=VALUE: {typed.override.wrong}")


def _several(typed: Typed) -> Problem:
    text, key = typed.override.text, typed.override.key
    return Problem(text, f"one run takes one value for {key}", "for several runs: tpi sweep, tpi verify")


def _deletion(typed: Typed) -> Problem:
    return Problem(typed.override.text, "fields cannot be deleted", f"set {typed.override.key}=null")


def _cluster_file(typed: Typed) -> Problem | None:
    if (file := typed.override.given_file) is None:
        return None
    try:
        hydra_tree.read(file)
    except ConfigError as error:
        return Problem("", f"cluster={error}")
    return None


def _option(typed: Typed) -> Problem | None:
    key, option = typed.override.key, typed.override.value
    if key == "model":
        return Problem(f"model={option}", f"the model is the first argument: tpi train {option} …")
    if typed.override.given_file or option in typed.groups[key]:
        return None
    return Problem(f"{key}={option}", f"unknown {key} '{option}'{nearest(option, typed.groups[key])}")


def _key(typed: Typed) -> Problem | None:
    key = typed.override.key
    if any(key in (short.name, short.path) for short in SHORT_KEYS.values()):
        return None
    problem = _key_problem(key, typed.groups)
    return replace(problem, key=typed.override.text) if problem else None


def _key_problem(key: str, groups: Mapping[str, tuple[str, ...]]) -> Problem | None:
    """Return what is wrong with a key that is not a short one, as far as it can be told without importing Bridge."""
    section = key.partition(".")[0]
    if key == "recipe":
        return Problem("", "recipe=NAME replaces the name of a model: tpi train recipe=NAME …")
    if key == f"dataset.{schema.PROVIDER}":
        return Problem("", "a recipe decides what its dataset is", "leave it out")
    if section not in schema.SECTIONS:
        known = (*SHORT_KEYS, *groups) if section == key else (f"{s}.{key.partition('.')[2]}" for s in schema.SECTIONS)
        hint = did_you_mean(schema.keys_of(key) or schema.keys_of(key.rpartition(".")[2])) or nearest(key, known)
        return Problem("", f"unknown key '{key}'{hint}")
    if section == key and section != "mixed_precision":
        return Problem("", f"'{key}' is a section", f"set one of its fields, as in {key}.FIELD=VALUE")
    return None


def _value(typed: Typed) -> Problem | None:
    try:
        _converted(typed.override)
    except WrongType as error:
        return Problem(typed.override.text, str(error))
    return None


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


def _decided_by_recipe(typed: Typed) -> Problem | None:
    """Return what only a recipe has, or what tpi fills in."""
    text, path = typed.override.text, typed.override.path
    if path == "data.kind" and typed.override.value == "recipe":
        return Problem(text, "a recipe with data of its own decides it", "data=mock or data=text")
    if not (path.startswith("recipe.") or path == adjusted.KEY):
        return None
    if not recipe_source.is_recipe(typed.model):
        return Problem(text, f"{typed.model} is no recipe", "recipe=NAME replaces the name of a model")
    return None if path in ("recipe.hf_folder", adjusted.KEY) else Problem(text, f"tpi fills {path} in", "leave it out")


# About the model; the override can be composed.
OF_RECIPES = (Rule(_decided_by_recipe),)
# An override that breaks one is left out, so that the same message has what is wrong beside it.
RULES: tuple[Rule[Typed], ...] = (
    Rule(_unread, needs=lambda typed: typed.parsed is None),
    Rule(_several, needs=lambda typed: typed.override.sweep),
    Rule(_deletion, needs=lambda typed: typed.parsed is not None and typed.parsed.is_delete()),
    Rule(_cluster_file, needs=lambda typed: typed.single),
    Rule(_option, needs=lambda typed: typed.single and typed.override.group),
    Rule(_key, needs=lambda typed: typed.single and not typed.override.group),
    Rule(_value, needs=lambda typed: typed.single),
)
