# SPDX-License-Identifier: Apache-2.0
"""What may be typed: words that are no override, keys that are none, and values that do not fit their fields.

A wrong word is left out, and the run is composed without it, so that one message has what is wrong beside it, too.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tp_invariant_recipes.check import typed as typed_rules
from tp_invariant_recipes.config import adjusted, hydra_tree
from tp_invariant_recipes.config.overrides import Override, given
from tp_invariant_recipes.errors import ConfigError, Problem, lines
from tp_invariant_recipes.settings import conf_files, field_table, schema
from tp_invariant_recipes.settings.keys import SHORT_KEYS, did_you_mean, nearest
from tp_invariant_recipes.settings.sections import OWN_SECTIONS
from tp_invariant_recipes.settings.values import WrongType, convert
from tp_invariant_recipes.sources import recipe_source

# To YAML 4:00:00 is 14400 and 010 is 8, so that text made of the value need not be what was written.
UNQUOTED = "expected text; in a file, write it in quotes"

type Groups = Mapping[str, tuple[str, ...]]  # Hydra's -> their options

_OF_SHORT = {key.path: key for key in SHORT_KEYS.values()}


def sound_overrides(model: str, overrides: Sequence[Override], problems: list[str]) -> list[Override]:
    """Return the overrides that name a key, short keys' values converted. What is wrong with others is a problem."""
    groups = conf_files.groups()
    problems += lines(problem for override in overrides for problem in _decided_by_recipe(override, model))
    sound = []
    single = list(overrides)
    for key, value in itertools.pairwise(overrides):
        if key.wrong and "=" not in key.text + value.text and (names := schema.keys_of(key.text)):
            problems.append(f"{key.text} {value.text}: write {names[0].partition('=')[0]}={value.text}")
            single = [override for override in single if override is not key and override is not value]
    for override in single:
        wrong = lines(replace(problem, rule="wrong_word") for problem in _wrong(override, groups))
        problems += wrong
        if not wrong:
            sound.append(_converted(override))
    return sound


def fitting_overrides(
    tree: Mapping[str, Any], overrides: Sequence[Override], problems: list[str], own: field_table.Hints
) -> list[Override]:
    """Return the overrides whose values fit their fields, with their types. What is wrong with others is a problem.

    tree: what the options of groups make, for the classes of its sections. An interpolation is judged once resolved.
    own: classes of a recipe's own, which this process does not import.
    """
    judged = [o for o in overrides if not o.group and "." in o.path and "${" not in str(o.data)]
    typed = _sections(tree, judged)
    asked = {
        section: [name for name in fields if f"{section}.{name}" not in _OF_SHORT] for section, fields in typed.items()
    }
    wrong = misfits(typed, asked, own) | _lost_precision(tree, overrides)
    problems += lines(wrong.values())
    fitting = [o for o in overrides if not any(f"{o.path}.".startswith(f"{path}.") for path in wrong)]
    return [_with_type(override, typed) if override in judged else override for override in fitting]


def _sections(tree: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Return sections with the values of overrides alone, and the classes that the tree names."""
    sections: dict[str, Any] = {}
    for override in overrides:
        *names, last = override.path.split(".")
        there: Any = tree
        fields = sections
        for name in names:
            there = there.get(name) if isinstance(there, Mapping) else None
            if not isinstance(inner := fields.get(name), dict):
                inner = fields[name] = dict(there) if fields is not sections and isinstance(there, Mapping) else {}
            fields = inner
        fields[last] = override.data
    for section in sections.keys() & {"model", "dataset"}:
        if schema.PROVIDER in tree.get(section, ()):
            sections[section].setdefault(schema.PROVIDER, tree[section][schema.PROVIDER])
    return sections


def _with_type(override: Override, sections: Mapping[str, Any]) -> Override:
    """Return an override with the value that its field's type makes of it. A mapping inside a field has none."""
    section, name, *inside = override.path.split(".")
    return override if inside else replace(override, data=sections[section][name])


def misfits(
    sections: dict[str, Any], requested: Mapping[str, Sequence[str]], own: field_table.Hints = MappingProxyType({})
) -> dict[str, Problem]:
    """Path -> problem, for every value that is out of its range or has another type. Plain values get their types.

    requested: section -> fields that only Bridge may be able to judge; it is imported for no other.
    own: as for `fitting_overrides`.
    """
    out_of_range = typed_rules.wrong(sections)
    wrong: dict[str, Problem] = {}
    table = {**field_table.read(), **own}
    for section in sorted(schema.SECTIONS & sections.keys()):
        if isinstance(sections[section], dict):
            values, problems = schema.check_section(section, sections, requested.get(section, ()), table)
            sections[section] |= {name: value for name, value in values.items() if type(value) in (bool, int, float)}
            wrong |= problems
    return typed_rules.wrong(sections) | _hinted(sections, wrong) | out_of_range  # texts have become numbers


def _hinted(sections: dict[str, Any], wrong: dict[str, Problem]) -> dict[str, Problem]:
    """Return these problems, with the usual correction where files mostly go wrong."""
    for path in [path for path in wrong if path.partition(".")[0] in OWN_SECTIONS]:
        section, _, name = path.partition(".")
        value = sections[section][name]
        if name in schema.SECTIONS:
            wrong[path] = Problem(path, "a file with sections in it begins with the line '# @package _global_'")
        elif path == "cluster.environment" and isinstance(value, dict):
            # Without the values: one may be a secret.
            keys = [f"{path}.{key}" for key, v in value.items() if type(v) is not str]
            each = {key: Problem(key, UNQUOTED) for key in keys}
            wrong = {key: problem for key, problem in wrong.items() if key != path or not each} | each
        elif "expected str" in wrong[path].text and isinstance(value, bool | int | float):
            wrong[path] = Problem(f"{path}={value}", UNQUOTED)
    return wrong


def _lost_precision(tree: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Problem]:
    """Path -> problem, where one field would replace the named recipe and all that its name stands for."""
    whole = given(overrides, "mixed_precision")
    name = whole.data if whole else tree.get("mixed_precision")
    if not isinstance(name, str):
        return {}
    hint = "name another recipe, or set mixed_precision=null and then every field that counts"
    why = f"mixed_precision={name} is a preset; setting one field discards it"
    typed = [override for override in overrides if override.path.startswith("mixed_precision.")]
    return {override.path: Problem(override.text, why, hint, rule="lost_precision") for override in typed}


def _wrong(override: Override, groups: Groups) -> Iterator[Problem]:
    """Yield why an override cannot be composed."""
    text, key = override.text, override.key
    if override.wrong is not None:
        shown = text if len(text) <= 200 else f"{text[:30]}…"
        yield Problem("", f"'{shown}' is not KEY=VALUE" + (f": {override.wrong}" if "=" in text else ""))
        return
    if override.several:
        yield Problem(text, f"one run takes one value for {key}", "for several layouts: tpi verify")
    if override.deletes:
        yield Problem(text, "fields cannot be deleted", f"set {key}=null")
    if not override.single:
        return
    if override.group:
        yield from _wrong_option(override, groups)
    elif override.path not in _OF_SHORT:
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
    short = _OF_SHORT.get(override.path)
    if short is None or not override.single or schema.takes_text(override.path):
        return override
    try:
        return replace(override, data=convert(override.data, short.type))
    except WrongType as error:
        raise WrongType(f"{short.help}: {error}") from None


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
