"""The sections of a run: composed by Hydra, numbers in their ranges, values of their types."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tp_invariant_recipes.config import bounds, hydra_tree
from tp_invariant_recipes.config.overrides import Override, cluster_files, quoted
from tp_invariant_recipes.config.recipe_question import hf_folder, read_recipe
from tp_invariant_recipes.errors import ConfigError, listed, refuse
from tp_invariant_recipes.settings import peft, schema
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.settings.nearest import nearest
from tp_invariant_recipes.settings.sections import OWN_SECTIONS
from tp_invariant_recipes.settings.tables import field_table
from tp_invariant_recipes.settings.values import WrongType, convert
from tp_invariant_recipes.sources import recipe_layer, recipe_source

OF_BRIDGE = schema.SECTIONS - OWN_SECTIONS.keys()

# Groups that a recipe decides unless the command line names an option.
RECIPES_OWN = ("precision", "data", "logging", "cuda_graph", "peft")

# To YAML 4:00:00 is 14400 and 010 is 8, so that text made of the value need not be what was written.
UNQUOTED = "expected text; in a file, write it in quotes"


def checked_sections(
    model: str, sound: Sequence[Override], problems: list[str]
) -> tuple[dict[str, Any], Sequence[Override]]:
    """Return the sections of those overrides whose numbers and types fit, and these overrides.

    What is wrong with others is added to `problems`.

    Raises ConfigError where files put into a section of Bridge's what no rule can judge.
    """
    sections = _hydra(model, sound, problems)
    by_default: set[str] = set()
    while wrong := _misfits(model, sections, sound, problems):
        problems += [problem for problem in wrong.values() if problem not in problems]
        accepted = [o for o in sound if o.path not in wrong]
        if len(accepted) < len(sound):
            sound = accepted
            sections = _hydra(model, sound, problems)
        elif by_default & wrong.keys() or any(path.partition(".")[0] in OF_BRIDGE for path in wrong):
            raise ConfigError(listed(problems), problems)
        else:
            _as_by_default(sections, wrong)
            by_default |= wrong.keys()
    return sections, sound


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


def _hydra(model: str, overrides: Sequence[Override], problems: list[str]) -> dict[str, Any]:
    """Return what Hydra composes, every section a mapping. Raises ConfigError, with `problems`, when there is none."""
    recipe = recipe_source.is_recipe(model)
    try:
        sections = _composed(model, overrides, recipe=recipe)
    except ConfigError as error:
        messages = [*problems, *error.problems]
        raise ConfigError(listed(messages), messages) from error
    if sections.get(peft.SECTION, ()) is None:  # peft=none
        del sections[peft.SECTION]
    why = "a file puts a value where fields belong, as in"
    if messages := [f"{name}: {why} {name}.FIELD" for name in _not_sections(sections)]:
        refuse([*problems, *messages])
    if recipe:
        _keep_recipes_fields(sections, model, overrides)
    return sections


def _composed(model: str, overrides: Sequence[Override], *, recipe: bool) -> dict[str, Any]:
    """Return what Hydra composes of a model, or of what a recipe says. Raises ConfigError."""
    file = next(iter(cluster_files(overrides)), None)
    arguments = [*(_named(file) if file else []), *map(_argument, overrides)]
    if not recipe:
        return hydra_tree.composed([f"model={model}", *arguments], file)
    chosen = {override.path for override in overrides}
    base = [f"model={hydra_tree.GIVEN}", *(f"~{group}" for group in RECIPES_OWN if group not in chosen)]
    return hydra_tree.composed([*base, *arguments], file, read_recipe(model, overrides).text)


def _argument(override: Override) -> str:
    """Return an override as Hydra takes it."""
    value = hydra_tree.GIVEN if override.given_file else override.value
    return f"{'' if override.group else '++'}{override.path}={value}"


def _keep_recipes_fields(sections: dict[str, Any], model: str, overrides: Sequence[Override]) -> None:
    """Drop the fields of tpi's defaults that a recipe leaves out, and note what else follows from its answer."""
    answer, typed = read_recipe(model, overrides), [override.path for override in overrides]
    sections["model"] = recipe_layer.without_defaults(sections["model"], answer)
    sections["dataset"] = recipe_layer.without_pretraining_fields(sections["dataset"], answer, typed)
    sections["recipe"]["hf_folder"] = hf_folder(overrides)
    sections["recipe"]["kept"] = [path for path in sections["recipe"]["kept"] if path not in typed]


def _not_sections(sections: dict[str, Any]) -> list[str]:
    known = [name for name in sections if name in schema.SECTIONS and name != "mixed_precision"]
    # An override makes a section again of what a file has put there, but `config.yaml` holds all fields of these.
    whole = {name: schema.fields(OWN_SECTIONS[name]).keys() for name in ("cluster", "slurm")}
    return [
        name for name in known if not isinstance(sections[name], dict) or whole.get(name, set()) - sections[name].keys()
    ]


def _named(file: Path) -> list[str]:
    """Return the argument that names a cluster after its file, unless the file names it: else it has the name of its
    base.
    """
    written = hydra_tree.read(file)
    section = written.get("cluster", written)  # a file without "# @package _global_" holds the section's fields alone
    named = not isinstance(section, dict) or "name" in section
    return [] if named else [f"++cluster.name={quoted(file.stem)}"]


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
    """Return these problems, with the usual correction where files mostly go wrong."""
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
    why = f"mixed_precision={name} is a preset; setting one field discards it; {hint}"
    return {override.path: f"{override.text}: {why}" for override in fields}
