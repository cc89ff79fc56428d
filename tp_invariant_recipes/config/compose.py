"""Compose `conf/` and the command line's overrides into one plain tree, with every mistake in one message."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from tp_invariant_recipes.config import (
    bounds,
    cuda_graphs,
    environment,
    hydra_tree,
    invariance,
    layout,
    low_precision,
    recording,
    schema,
    source,
)
from tp_invariant_recipes.config.keys import SHORT_KEYS
from tp_invariant_recipes.config.nearest import nearest
from tp_invariant_recipes.config.settings import AS_TYPED, OWN_SECTIONS
from tp_invariant_recipes.config.values import WrongType, convert
from tp_invariant_recipes.errors import ConfigError

# To YAML 4:00:00 is 14400 and 010 is 8, so that text made of the value need not be what was written.
UNQUOTED = "expected text; in a file, write it in quotes"


@dataclass(frozen=True)
class Composed:
    """A run as composed.

    model:     the model's name.
    overrides: what was asked for, as typed.
    tree:      plain dicts and lists, interpolations resolved; one key per section.
    """

    model: str
    overrides: tuple[str, ...]
    tree: dict[str, Any]


@dataclass(frozen=True)
class _Assignment:
    """One sound override: a group choice or a value for a dotted path.

    file: of a cluster that is not one of ours, which was read.
    """

    text: str
    path: str
    value: str
    group: bool
    file: Path | None = None


def compose(model: str, overrides: Sequence[str] = (), *, device: str | None = None) -> Composed:
    """Compose a run of `model`.

    overrides: `key=value` with short keys, Hydra groups, or the dotted path of any field of Bridge's; `cluster=FILE` of
               YAML is a cluster that lies anywhere.
    device:    the group used where the overrides name none ("cpu" or "gpu").
    Raises ConfigError listing every problem that can be found without building the model.
    """
    groups = source.groups()
    problems = source.problems()
    known = model in groups["model"]
    if not known:
        problems.append(f"unknown model '{model}'{nearest(model, groups['model'])}")
    # A faulty override is reported and left out, so that what is wrong beside it is found in the same breath.
    sound = _understand(overrides, groups, problems)
    if device is not None and not any(a.group and a.path == "device" for a in sound):
        sound.append(_Assignment(f"device={device}", "device", device, group=True))
    if known:
        tree = _hydra(model, sound, problems)
        if beyond := bounds.wrong(tree):  # before any rule, which may count up to such a number
            typed = {a.path: beyond[a.path] for a in sound if a.path in beyond}
            problems += (typed or beyond).values()  # other fields may follow from a typed one
            sound = [a for a in sound if a.path not in beyond]
            tree = _hydra(model, sound, problems)
            if bounds.wrong(tree):  # of a file
                raise ConfigError(listed(problems), problems)
        wrong = _check_fields(tree, sound) | _lost_precision(model, sound, problems)
        if wrong:
            problems += wrong.values()
            sound = [a for a in sound if a.path not in wrong]
            tree = _hydra(model, sound, problems)
            _as_by_default(tree, _check_fields(tree, sound))
        rules = (layout, invariance, cuda_graphs, low_precision, recording, environment)
        problems += [problem for rule in rules for problem in rule.problems(tree)]
    if problems:
        raise ConfigError(listed(problems), problems)
    return Composed(model, tuple(overrides), tree)


def _understand(overrides: Iterable[str], groups: dict[str, tuple[str, ...]], problems: list[str]) -> list[_Assignment]:
    parser = OverridesParser.create()
    assignments = []
    for text in overrides:
        try:
            parsed = parser.parse_override(as_typed(text))
        except HydraException as error:
            problems.append(f"'{text}' is not KEY=VALUE: {str(error).splitlines()[0]}")
            continue
        except ValueError:  # Python reads no number of more than 4300 digits
            problems.append(f"{text[:30]}…: too many digits")
            continue
        key = parsed.key_or_group
        if parsed.is_sweep_override():
            problems.append(f"{text}: one run takes one value for {key}")
        elif parsed.is_delete():
            problems.append(f"{text}: fields cannot be deleted; set {key}=null")
        elif key == "cluster" and _names_file(value := str(parsed.value())):
            file = Path(os.path.expanduser(value)).absolute()
            try:
                hydra_tree.read(file)
            except ConfigError as error:
                problems.append(f"cluster={error}")
            else:
                assignments.append(_Assignment(text, key, hydra_tree.GIVEN, group=True, file=file))
        elif key in groups:
            if problem := _group_problem(key, parsed.get_value_string(), groups):
                problems.append(problem)
            else:
                option = parsed.get_value_string()
                own = source.users_file(key, option) if key == "cluster" else None
                assignments.append(_Assignment(text, key, option, group=True, file=own))
        elif short := SHORT_KEYS.get(key) or next((k for k in SHORT_KEYS.values() if k.path == key), None):
            try:
                # Converted before Hydra sees it, because interpolations and rules build on it: sp=off is no string.
                value = convert(parsed.value(), short.type)
            except WrongType as error:
                problems.append(f"{text}: {short.help}: {error}")
            else:
                assignments.append(_Assignment(text, short.path, str(value), group=False))
        elif problem := _key_problem(key, groups):
            problems.append(f"{text}: {problem}")
        else:
            assignments.append(_Assignment(text, key, parsed.get_value_string(), group=False))
    return assignments


def as_typed(text: str) -> str:
    """Quote the value of a key that holds a path or a text, so that Hydra does not read it as its grammar."""
    key, _, value = text.partition("=")
    name = key.lstrip("+")
    typed = name in AS_TYPED or name.startswith("cluster.environment.") or (name == "cluster" and _names_file(value))
    if not typed or value in ("", "null") or value[0] in "'\"":
        return text
    return f"{key}={_quoted(value)}"


def _quoted(text: str) -> str:
    return f'"{text.replace(chr(34), chr(92) + chr(34))}"'


def cluster_files(overrides: Iterable[str]) -> list[Path]:
    """The file that describes the cluster of these overrides, where it is not one of ours."""
    given = [text.partition("=")[2] for text in overrides if text.startswith("cluster=")]
    if not given:
        return []
    file = Path(given[-1]) if _names_file(given[-1]) else source.users_file("cluster", given[-1])
    return [file] if file else []


def _names_file(cluster: str) -> bool:
    """Whether the value of `cluster=` is a file and not one of the group's options."""
    return "/" in cluster or cluster.endswith((".yaml", ".yml"))


def _group_problem(key: str, option: str, groups: dict[str, tuple[str, ...]]) -> str | None:
    if key == "model":
        return f"model={option}: the model is the first argument: tpi train {option} …"
    if option in groups[key]:
        return None
    return f"{key}={option}: unknown {key} '{option}'{nearest(option, groups[key])}"


def _key_problem(key: str, groups: dict[str, tuple[str, ...]]) -> str | None:
    """What is wrong with a key that is not a short one, as far as it can be told without importing Bridge."""
    section = key.partition(".")[0]
    if section not in schema.SECTIONS:
        known = (*SHORT_KEYS, *groups) if section == key else (f"{s}.{key.partition('.')[2]}" for s in schema.SECTIONS)
        return f"unknown key '{key}'{nearest(key, known)}"
    if section == key and section != "mixed_precision":
        return f"'{key}' is a section; set one of its fields, as in {key}.FIELD=VALUE"
    return None


def _hydra(model: str, assignments: Sequence[_Assignment], problems: list[str]) -> dict[str, Any]:
    """The tree, with every section in it a mapping. Raises ConfigError, with `problems`, when there is none."""
    clusters = [a.file for a in assignments if a.group and a.path == "cluster"]
    file = clusters[-1] if clusters else None
    arguments = [f"{'' if a.group else '++'}{a.path}={a.value}" for a in assignments]
    try:
        named = _named(file) if file else []
        tree = hydra_tree.composed([f"model={model}", *named, *arguments], file)
    except ConfigError as error:
        found = [*problems, *error.problems]
        raise ConfigError(listed(found), found) from error
    found = [f"{name}: a file puts a value where fields belong, as in {name}.FIELD" for name in _not_sections(tree)]
    if found:
        found = [*problems, *found]
        raise ConfigError(listed(found), found)
    return tree


def _not_sections(tree: dict[str, Any]) -> list[str]:
    sections = [name for name in tree if name in schema.SECTIONS and name != "mixed_precision"]
    # An override makes a section again of what a file has put there, but `config.yaml` holds all fields of these.
    whole = {name: schema.fields(OWN_SECTIONS[name]).keys() for name in ("cluster", "slurm")}
    return [name for name in sections if not isinstance(tree[name], dict) or whole.get(name, set()) - tree[name].keys()]


def _named(file: Path) -> list[str]:
    """The argument that names a cluster after its file, unless the file names it: else it has the name of its base."""
    written = hydra_tree.read(file)
    section = written.get("cluster", written)  # a file without "# @package _global_" holds the section's fields alone
    named = not isinstance(section, dict) or "name" in section
    return [] if named else [f"++cluster.name={_quoted(file.stem)}"]


def _check_fields(tree: dict[str, Any], assignments: Iterable[_Assignment]) -> dict[str, str]:
    """Path -> problem, in our sections and in those of Bridge's where the user set a field directly; plain values there
    get their type.

    The other sections are as files have them; they are checked when the container is built.
    """
    short = {key.path for key in SHORT_KEYS.values()}
    touched = {a.path.partition(".")[0] for a in assignments if not a.group and a.path not in short}
    wrong = {
        section: f"{section}: no such section{nearest(section, schema.SECTIONS)}"
        for section in tree
        if section not in schema.SECTIONS
    }
    for section in sorted(touched | OWN_SECTIONS.keys()):
        if isinstance(tree[section], dict):
            values, problems = schema.convert_section(section, tree)
            tree[section] |= {name: value for name, value in values.items() if type(value) in (bool, int, float)}
            wrong |= problems
    return _hinted(tree, wrong)


def _hinted(tree: dict[str, Any], wrong: dict[str, str]) -> dict[str, str]:
    """The same, with what would mend it where files mostly go wrong."""
    for path in [path for path in wrong if path.partition(".")[0] in OWN_SECTIONS]:
        section, _, name = path.partition(".")
        value = tree[section][name]
        if name in schema.SECTIONS:
            wrong[path] = f"{path}: a file with sections in it begins with the line '# @package _global_'"
        elif path == "cluster.environment" and isinstance(value, dict):
            # Without the values: one may be a secret.
            each = {f"{path}.{key}": f"{path}.{key}: {UNQUOTED}" for key, v in value.items() if type(v) is not str}
            wrong = {key: problem for key, problem in wrong.items() if key != path or not each} | each
        elif "expected str" in wrong[path] and isinstance(value, bool | int | float):
            wrong[path] = f"{path}={value}: {UNQUOTED}"
    return wrong


def _as_by_default(tree: dict[str, Any], wrong: Iterable[str]) -> None:
    """Put defaults where files hold what was said to be wrong, so that what else is wrong can be said as well."""
    for section, _, name in (path.partition(".") for path in wrong):
        if section in OWN_SECTIONS:
            field = name.partition(".")[0]
            tree[section][field] = asdict(OWN_SECTIONS[section]()).get(field)


def _lost_precision(model: str, assignments: Sequence[_Assignment], problems: list[str]) -> dict[str, str]:
    """Path -> problem, where one field would replace the named recipe and all that its name stands for."""
    fields = [a for a in assignments if a.path.startswith("mixed_precision.")]
    name = _hydra(model, [a for a in assignments if a not in fields], problems)["mixed_precision"] if fields else None
    if not isinstance(name, str):
        return {}
    hint = "name another recipe, or set mixed_precision=null and then every field that counts"
    return {a.path: f"{a.text}: mixed_precision={name} is a whole that one field would replace; {hint}" for a in fields}


def listed(problems: Sequence[str]) -> str:
    """One message for all problems."""
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} problems in this configuration:", *(f"  - {p}" for p in problems)])
