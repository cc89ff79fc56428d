"""What may follow on a command line: keys, sections, fields of sections, and the values of keys that have a list.

A shell asks at every press of TAB, so nothing here imports Hydra, torch or Megatron. Fields of Bridge come from the
table of settings/tables/field_table.py; without the table a section of Bridge offers nothing.
"""

import types
import typing
from typing import Any, Literal

from tp_invariant_recipes.settings import conf_files, schema
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.settings.sections import OWN_KEYS, OWN_SECTIONS, PATHS
from tp_invariant_recipes.settings.tables import field_table
from tp_invariant_recipes.settings.values import describe
from tp_invariant_recipes.sources import recipe_source

Offers = list[tuple[str, str]]  # a word, and a few words about it

DEGREES = ("tp", "pp", "dp", "cp", "ep", "etp")
FEW = ("1", "2", "4", "8")  # degrees to begin with; others are typed
# Names of an Enum of Megatron's, whose type the table cannot hold.
NAMES = {"model.attention_backend": ("flash", "fused", "unfused", "local", "auto")}


def models(incomplete: str) -> Offers:
    """Return the models whose names begin so; after `recipe=` the recipes of Bridge, from a table."""
    key, is_, name = incomplete.partition("=")
    if is_:
        recipes = [f"recipe={recipe}" for recipe in recipe_source.names() if recipe.startswith(name)]
        return [(word, "a recipe of Megatron-Bridge") for word in recipes] if key == "recipe" else []
    recipe = [("recipe=", "a recipe of Megatron-Bridge, or of a file")] if "recipe=".startswith(incomplete) else []
    return recipe + [
        (m, conf_files.summary("model", m)) for m in conf_files.groups()["model"] if m.startswith(incomplete)
    ]


def overrides(incomplete: str, *, several: bool = False) -> Offers:
    """Whole words `KEY=`, `SECTION.` or `KEY=VALUE` that begin so.

    several: whether a key may have several values, as in tp=1,2: then each further one is offered once.
    """
    key, is_, text = incomplete.partition("=")
    if not is_:
        return [offer for offer in _keys(key) if offer[0].startswith(key)]
    before, comma, last = text.rpartition(",")
    if comma and not several:
        return []
    given = before.split(",")
    return [
        (f"{key}={before}{comma}{value}", about)
        for value, about in _values(key)
        if value.startswith(last) and value not in given
    ]


def takes_file(incomplete: str) -> bool:
    """Whether the value that is typed here may be a file."""
    key, is_, _ = incomplete.partition("=")
    path = SHORT_KEYS[key].path if key in SHORT_KEYS else key
    return bool(is_) and (path in PATHS or key == "cluster")


def _keys(text: str) -> Offers:
    """Keys and sections; the fields of a section once its dot is typed."""
    section, dot, _ = text.partition(".")
    if dot:
        return [_field(section, name, hint) for name, hint in _fields(section).items()]
    groups = [(f"{group}=", ", ".join(options)) for group, options in conf_files.groups().items() if group != "model"]
    sections = [(f"{name}.", "fields of this section") for name in sorted(schema.SECTIONS)]
    return [*((f"{key.name}=", key.help) for key in SHORT_KEYS.values()), *groups, *sections]


def _field(section: str, name: str, hint: Any) -> tuple[str, str]:
    mapping = typing.get_origin(hint) is dict
    return f"{section}.{name}{'.' if mapping else '='}", "" if hint is None else describe(hint)


def _fields(section: str) -> dict[str, Any]:
    """Field -> type hint; None for a hint that only Bridge knows."""
    if section in OWN_SECTIONS:
        return schema.fields(OWN_SECTIONS[section])
    table = field_table.read()
    known = {"mixed_precision": schema.MIXED_PRECISION, **schema.BRIDGE_SECTIONS}.get(section)
    paths = schema.PROVIDERS if known == schema.PROVIDER else (known,)  # which of these a model has, its file says
    hints = {name: hint for path in paths for name, hint in table.get(str(path), {}).items()}
    own = {path.partition(".")[2]: hint for path, hint in OWN_KEYS.items() if path.startswith(f"{section}.")}
    return {name: hints[name] for name in sorted(hints)} | own


def _values(key: str) -> Offers:
    if key in conf_files.group_names() and key != "model":
        return [(option, conf_files.summary(key, option)) for option in conf_files.groups()[key]]
    if key in DEGREES:
        return [(degree, SHORT_KEYS[key].help) for degree in FEW]
    if key in NAMES:
        return [(name, "") for name in NAMES[key]]
    short = SHORT_KEYS.get(key)
    section, _, name = key.partition(".")
    hint = short.type if short else _fields(section).get(name)
    return [(value, short.help if short else "") for value in _choices(hint)]


def _choices(hint: Any) -> list[str]:
    """Return the values of a type that has few; empty for a number or a text."""
    if hint is bool:
        return ["true", "false"]
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        args = typing.get_args(hint)
        choices = [value for arg in args for value in _choices(arg)]
        return [*choices, "null"] if choices and type(None) in args else choices
    return []
