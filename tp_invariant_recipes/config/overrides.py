# SPDX-License-Identifier: Apache-2.0
"""Overrides: `key=value` as typed on a command line, read once and passed on as read."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as HydrasOverride
from hydra.errors import HydraException

from tp_invariant_recipes.errors import ConfigError, Problem, lines, reason
from tp_invariant_recipes.reading import MIB, parse_yaml, read_limited
from tp_invariant_recipes.settings import conf_files, schema
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.settings.values import value_text
from tp_invariant_recipes.sources import recipe_layer

_VARIABLE = re.compile(r"cluster\.environment\.\w+", re.ASCII)
_QUOTED = re.compile(r"(['\"]).*\1", re.DOTALL)

# Groups whose options are told apart by one field. `launcher=slurm` and `launcher.kind=slurm` decide the same.
DECIDED_BY = {
    "numerics": "mode",
    "cluster": "name",
    "device": "kind",
    "data": "kind",
    "logging": "kind",
    "launcher": "kind",
    "guard": "kind",
}


@dataclass(frozen=True)
class Override:
    """One `key=value`.

    text:    as typed.
    key:     without Hydra's plus signs.
    path:    what it sets: the dotted path of a field, short keys resolved, or the name of a group.
    value:   its text.
    group:   whether it chooses an option of a Hydra group.
    data:    what the text means: a number, a text, a truth value, a list, a mapping, or None.
    several: as Hydra's grammar has it, where it gives several values.
    deletes: whether it is `~key`.
    wrong:   why the text is no KEY=VALUE; None: it is one.
    """

    text: str
    key: str
    path: str
    value: str
    group: bool
    data: Any = None
    several: HydrasOverride | None = None
    deletes: bool = False
    wrong: str | None = None

    @property
    def field(self) -> str:
        """The field that it decides: `launcher.kind` for `launcher=slurm`; a group without such a field is its own."""
        return f"{self.path}.{DECIDED_BY[self.path]}" if self.group and self.path in DECIDED_BY else self.path

    @property
    def single(self) -> bool:
        """Whether it gives a field one value."""
        return not (self.wrong or self.several or self.deletes)

    @property
    def given_file(self) -> Path | None:
        """The file that `cluster=FILE` names."""
        return Path(os.path.expanduser(self.value)).absolute() if self.path == "cluster" and _file(self.value) else None

    @property
    def file(self) -> Path | None:
        """The file of the cluster that it chooses, where that is not one of ours."""
        return self.given_file or (conf_files.users_file("cluster", self.value) if self.path == "cluster" else None)

    def with_value(self, value: str) -> Override:
        """Return this key with another value."""
        return parse(f"{self.text.partition('=')[0]}={value}")


def parse(text: str | Override) -> Override:
    """Read one override; what is read already is returned as it is.

    A field of text has the text as typed. Hydra's grammar reads all other values, and text in quotes.
    """
    if isinstance(text, Override):
        return text
    key, is_, value = text.partition("=")
    key = key.lstrip("+")
    path = SHORT_KEYS[key].path if key in SHORT_KEYS else key
    if is_ and _takes_text(key, path, value) and value != "null" and not _QUOTED.fullmatch(value):
        return Override(text, key, path, value, key == "cluster", value)
    try:
        parsed = _parser().parse_override(text)
    except HydraException as error:
        return Override(text, key, path, value, key in conf_files.group_names(), wrong=str(error).splitlines()[0])
    except ValueError:  # Python reads no number of more than 4300 digits
        return Override(text, key, path, value, key in conf_files.group_names(), wrong="too many digits")
    key = parsed.key_or_group
    path, group = SHORT_KEYS[key].path if key in SHORT_KEYS else key, key in conf_files.group_names()
    if parsed.is_delete():
        return Override(text, key, path, value, group, deletes=True)
    if parsed.is_sweep_override():
        return Override(text, key, path, parsed.get_value_string(), group, several=parsed)
    data: Any = parsed.value()
    value = data if key == "cluster" and isinstance(data, str) else parsed.get_value_string()
    return Override(text, key, path, value, group, data)


def parse_all(texts: Iterable[str | Override]) -> list[Override]:
    """Read all overrides of a command, in their order."""
    return [parse(text) for text in texts]


def requested(overrides: Iterable[str | Mapping[str, object]], keys: Mapping[str, object]) -> list[Override]:
    """Read the overrides of a program: texts, mappings of keys to values, and keywords. A tuple gives several values.
    A mapping may hold mappings: {"optimizer": {"lr": 1e-3}} is optimizer.lr.

    Raises ConfigError: two of them contradict each other. A value of no kind that a key takes makes a wrong override.
    """
    read = parse_all(text for text in overrides if isinstance(text, str))
    for values in (*(mapping for mapping in overrides if not isinstance(mapping, str)), keys):
        for key, value in _leaves(values):
            override = _of_value(key, os.fspath(value) if isinstance(value, os.PathLike) else value)
            other = given(read, override.field)
            if other is not None and other.value != override.value:
                raise ConfigError(f"{other.text} and {key}={value!r} contradict each other; give one of them")
            read.append(override)
    return read


def _leaves(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _of_value(key: str, value: object) -> Override:
    if not _plain(value):
        text = f"{key}={value!r:.80}"
        return Override(text, key, key, "", False, wrong="a value is a number, text, bool, None, or lists of these")
    return parse(f"{key}={','.join(map(value_text, value)) if isinstance(value, tuple) else value_text(value)}")


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(inner) for key, inner in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def words_of_file(file: Path) -> list[str]:
    """Return the keys of a YAML file as one types them: nested or dotted, values as they are written.

    Raises ConfigError: it cannot be read, is no mapping, or has a key twice.
    """
    try:
        data = read_limited(file.expanduser(), MIB)
        parse_yaml(data)  # which bounds what it holds
        node = yaml.compose(data, yaml.SafeLoader)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {file}: {reason(error)}") from error
    if not isinstance(node, yaml.MappingNode | None):
        raise ConfigError(f"--config {file}: not a mapping of keys to values, such as tp: 4")
    words = [*_words("", node)] if node else []
    keys = [word.partition("=")[0] for word in words]
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise ConfigError(f"--config {file}: {', '.join(twice)} stands there twice")
    return words


def _words(prefix: str, mapping: yaml.MappingNode) -> Iterator[str]:
    for key, value in mapping.value:
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _words(f"{prefix}{key.value}.", value)
        else:
            yield f"{prefix}{key.value}={_as_typed(value)}"


def _as_typed(node: yaml.Node, *, inside: bool = False) -> str:
    """Return a value of YAML as one types it. inside: of a list or a mapping, where text may need quotes."""
    if isinstance(node, yaml.SequenceNode):
        return f"[{','.join(_as_typed(item, inside=True) for item in node.value)}]"
    if isinstance(node, yaml.MappingNode):
        return f"{{{','.join(f'{key.value}:{_as_typed(value, inside=True)}' for key, value in node.value)}}}"
    plain = isinstance(node, yaml.ScalarNode) and node.style is None
    if plain and node.tag == "tag:yaml.org,2002:null":
        return "null"
    return value_text(node.value) if not plain or (inside and node.tag == "tag:yaml.org,2002:str") else node.value


def texts(overrides: Iterable[Override]) -> tuple[str, ...]:
    """As they are written down."""
    return tuple(override.text for override in overrides)


def given(overrides: Iterable[Override], path: str) -> Override | None:
    """Return the override that sets this field, or chooses the group that decides it; of several the last, which
    counts.
    """
    return next((override for override in reversed([*overrides]) if path in (override.path, override.field)), None)


def of_two_keys(overrides: Iterable[Override]) -> list[str]:
    """One line for each field that two keys give two values, such as a short key and a path."""
    first: dict[str, Override] = {}
    twice = [
        (before, override)
        for override in overrides
        if override.wrong is None and (before := first.setdefault(override.field, override)).key != override.key
    ]
    return lines(
        Problem("", f"{a.text} and {b.text} set the same field, {a.field}", "leave one out", rule="two_keys")
        for a, b in twice
        if a.value != b.value and a.path != "cluster"
    )


def latest(overrides: Iterable[Override]) -> list[Override]:
    """Those that count: of several for a field the last."""
    overrides = [*overrides]
    last = {override.field: override for override in overrides}
    return [override for override in overrides if last[override.field] is override]


def changed(overrides: Iterable[str | Override], changes: Iterable[str | Override]) -> list[Override]:
    """Return the overrides with changes, which count: what sets a field of theirs by another key is left out."""
    read = parse_all(changes)
    fields = {override.field for override in read}
    return [*(override for override in parse_all(overrides) if override.field not in fields), *read]


def cluster_files(overrides: Iterable[Override]) -> list[Path]:
    """Return the file that describes the cluster of these overrides, where it is not one of ours."""
    chosen = [override for override in overrides if override.path == "cluster"]
    return [file] if chosen and (file := chosen[-1].file) else []


@functools.cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _takes_text(key: str, path: str, value: str) -> bool:
    """Whether a key takes text and nothing else, or names the file of a cluster."""
    if key == "cluster":
        return _file(value)
    return bool(_VARIABLE.fullmatch(path)) or schema.takes_text(path)


def _file(cluster: str) -> bool:
    """Whether the value of `cluster=` is a file and not one of the group's options."""
    return "/" in cluster or cluster.endswith((".yaml", ".yml"))


# What a run asks of its recipe, and the answer.


def read_recipe(model: str, overrides: Sequence[Override]) -> recipe_layer.RecipeAnswer:
    """Return the lowest layer of the configuration, and more. Raises ConfigError."""
    data = given(overrides, "data")
    return recipe_layer.read_recipe(model, hf_folder(overrides), data is not None and data.value == "text")


def hf_folder(overrides: Sequence[Override]) -> str | None:
    """Return the absolute path of `recipe.hf_folder`. Raises ConfigError: there is no configuration."""
    requested = given(overrides, "recipe.hf_folder")
    if requested is None or not requested.single or requested.data is None:
        return None
    folder = Path(str(requested.data)).expanduser().absolute()
    try:
        read_limited(folder / "config.json", MIB)  # transformers would read it whole
    except (OSError, ValueError) as error:
        why = f"config.json: {reason(error)}" if folder.is_dir() else "there is no such folder"
        raise ConfigError(f"{requested.text}: {why}") from error
    return str(folder)


_OUT = "leave it out"
_SRUN = {"launcher.kind": ("in a job srun starts the ranks", _OUT)}

# Command -> field, in whatever spelling -> why it is not taken, and what to do instead.
_AUDIT = {
    "launcher.kind": ("an audit runs on this machine", _OUT),
    "run.dir": ("an audit has its own directory", "--dir PATH"),
}
RESERVED: dict[str, dict[str, tuple[str, str]]] = {
    "submit": _SRUN,
    "submit --resume": {
        **_SRUN,
        "run.dir": ("the job goes on in the run's own directory", _OUT),
        "checkpoint.ckpt_step": (
            "each start of a job continues from the newest checkpoint",
            "tpi train --resume takes another",
        ),
    },
    "verify": {
        "run.dir": ("every configuration has its own run directory below one directory", "--dir PATH"),
        "launcher.kind": (
            "the configurations are trained here, one after another",
            "in jobs of their own: tpi submit --verify",
        ),
    },
    "audit": {
        **_AUDIT,
        "checkpoint.save_interval": ("an audit saves no checkpoints", _OUT),
        "ledger.trace": ("an audit records every module itself", _OUT),
        "ledger.dump": ("an audit records every tensor itself", _OUT),
    },
    "audit --resume-at": {
        **_AUDIT,
        "checkpoint.save_interval": ("the audit saves at step K of --resume-at", _OUT),
        "checkpoint.ckpt_step": ("the audit loads the checkpoint of step K of --resume-at", _OUT),
    },
    "bench": {
        "numerics.mode": ("a benchmark sets the mode itself", "--modes stock,tree"),
        "train.train_iters": ("a benchmark counts its own steps", "--warmup N --steps N"),
        "checkpoint.save_interval": ("a benchmark saves no checkpoints", _OUT),
        "launcher.kind": ("a benchmark runs on this machine", _OUT),
        "run.dir": ("a benchmark has its own directory", "--dir PATH"),
        "ledger.digests": ("a mode decides whether it records digests", "--modes tree,tree+digests"),
        "ledger.trace": ("a benchmark traces no modules", _OUT),
        "ledger.dump": ("a benchmark dumps no tensors", _OUT),
    },
}


def check_reserved(command: str, overrides: Iterable[Override]) -> tuple[list[str], list[Override]]:
    """Return what is wrong with the overrides that the command decides itself, and the other overrides."""
    problems, sound = [], []
    for override in overrides:
        if reserved := RESERVED[command].get(override.field):
            problems.append(str(Problem(override.text, *reserved)))
        else:
            sound.append(override)
    return problems, sound
