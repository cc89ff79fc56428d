"""Compose `conf/` and the command line's overrides into one plain tree, with every mistake in one message."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tp_invariant_recipes.config import invariance, layout, recording, schema, source
from tp_invariant_recipes.config.keys import SHORT_KEYS
from tp_invariant_recipes.config.nearest import nearest
from tp_invariant_recipes.config.settings import PATHS
from tp_invariant_recipes.config.values import WrongType, convert
from tp_invariant_recipes.errors import ConfigError


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
    """One sound override: a group choice or a value for a dotted path."""

    text: str
    path: str
    value: str
    group: bool


def compose(model: str, overrides: Sequence[str] = (), *, device: str | None = None) -> Composed:
    """Compose a run of `model`.

    overrides: `key=value` with short keys, Hydra groups, or the dotted path of any field of Bridge's.
    device:    the group used where the overrides name none ("cpu" or "gpu").
    Raises ConfigError listing every problem that can be found without building the model.
    """
    groups = source.groups()
    problems: list[str] = []
    known = model in groups["model"]
    if not known:
        problems.append(f"unknown model '{model}'{nearest(model, groups['model'])}")
    # A faulty override is reported and left out, so that what is wrong beside it is found in the same breath.
    sound = _understand(overrides, groups, problems)
    if device is not None and not any(a.group and a.path == "device" for a in sound):
        sound.append(_Assignment(f"device={device}", "device", device, group=True))
    if known:
        tree = _hydra(model, sound, problems)
        wrong = _check_bridge_fields(tree, sound) | _lost_precision(model, sound, problems)
        if wrong:
            problems += wrong.values()
            sound = [a for a in sound if a.path not in wrong]
            tree = _hydra(model, sound, problems)
            _check_bridge_fields(tree, sound)
        problems += [*layout.problems(tree), *invariance.problems(tree), *recording.problems(tree)]
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
        key = parsed.key_or_group
        if parsed.is_sweep_override():
            problems.append(f"{text}: one run takes one value for {key}")
        elif parsed.is_delete():
            problems.append(f"{text}: fields cannot be deleted; set {key}=null")
        elif key in groups:
            if problem := _group_problem(key, parsed.get_value_string(), groups):
                problems.append(problem)
            else:
                assignments.append(_Assignment(text, key, parsed.get_value_string(), group=True))
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
    """Quote the value of a key that holds a path, so that Hydra does not read it as its grammar."""
    key, _, value = text.partition("=")
    if key.lstrip("+") not in PATHS or value in ("", "null") or value[0] in "'\"":
        return text
    return f'{key}="{value.replace(chr(34), chr(92) + chr(34))}"'


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


def _hydra(model: str, assignments: Iterable[_Assignment], problems: list[str]) -> dict[str, Any]:
    OmegaConf.register_new_resolver("tpi.more_than_one", lambda n: isinstance(n, int) and n > 1, replace=True)
    arguments = [f"model={model}"]
    arguments += [f"{'' if a.group else '++'}{a.path}={a.value}" for a in assignments]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(source.conf_dir()), version_base="1.3"):
            tree: Any = OmegaConf.to_container(hydra_compose("config", overrides=arguments), resolve=True)
            return tree
    except (HydraException, OmegaConfBaseException) as error:
        found = [*problems, str(error).splitlines()[0]]
        raise ConfigError(listed(found), found) from error


def _check_bridge_fields(tree: dict[str, Any], assignments: Iterable[_Assignment]) -> dict[str, str]:
    """Path -> problem, in the sections where the user set a field directly; plain values there get their type.

    The other sections are as `conf/` has them; they are checked when the container is built.
    """
    short = {key.path for key in SHORT_KEYS.values()}
    touched = {a.path.partition(".")[0] for a in assignments if not a.group and a.path not in short}
    wrong: dict[str, str] = {}
    for section in sorted(touched):
        if isinstance(tree[section], dict):
            values, problems = schema.convert_section(section, tree)
            tree[section] |= {name: value for name, value in values.items() if type(value) in (bool, int, float)}
            wrong |= problems
    return wrong


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
