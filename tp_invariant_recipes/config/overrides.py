"""Overrides: `key=value` as typed on a command line, read once and passed on as read."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as HydrasOverride
from hydra.errors import HydraException

from tp_invariant_recipes.settings import conf_files
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.settings.sections import AS_TYPED

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

    text:   as typed.
    key:    without Hydra's plus signs.
    path:   what it sets: the dotted path of a field, short keys resolved, or the name of a group.
    value:  its text, which Hydra's grammar reads again.
    group:  whether it chooses an option of a Hydra group.
    parsed: as Hydra's grammar has it; None: the text is no KEY=VALUE, and `wrong` says why.
    """

    text: str
    key: str
    path: str
    value: str
    group: bool
    parsed: HydrasOverride | None
    wrong: str | None = None

    @property
    def field(self) -> str:
        """The field that it decides: `launcher.kind` for `launcher=slurm`; a group without such a field is its own."""
        return f"{self.path}.{DECIDED_BY[self.path]}" if self.group and self.path in DECIDED_BY else self.path

    @property
    def sweep(self) -> bool:
        """Whether it gives several values."""
        return self.parsed is not None and self.parsed.is_sweep_override()

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
    """Read one override; what is read already is returned as it is."""
    if isinstance(text, Override):
        return text
    key, _, value = text.partition("=")
    key = key.lstrip("+")
    parsed, wrong = None, None
    try:
        parsed = by_hydra(_as_typed(text))
    except HydraException as error:
        wrong = str(error).splitlines()[0]
    except ValueError:  # Python reads no number of more than 4300 digits
        wrong = "too many digits"
    if parsed is not None:
        key = parsed.key_or_group
        if not parsed.is_delete():
            text_of_it = not parsed.is_sweep_override() and isinstance(parsed.value(), str)
            value = str(parsed.value()) if key == "cluster" and text_of_it else parsed.get_value_string()
    path = SHORT_KEYS[key].path if key in SHORT_KEYS else key
    return Override(text, key, path, value, key in conf_files.group_names(), parsed, wrong)


def parse_all(texts: Iterable[str | Override]) -> list[Override]:
    """Read all overrides of a command, in their order."""
    return [parse(text) for text in texts]


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
        if override.parsed and (before := first.setdefault(override.field, override)).key != override.key
    ]
    return [
        f"{a.text} and {b.text} set the same field, {a.field}; leave one out"
        for a, b in twice
        if a.value != b.value and a.path != "cluster"
    ]


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
def by_hydra(text: str) -> HydrasOverride:
    """Return an override as Hydra's grammar has it, which takes milliseconds. Raises HydraException and ValueError."""
    return _parser().parse_override(text)


@functools.cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _as_typed(text: str) -> str:
    """Quote the value of a key that holds a path or a text, so that Hydra does not read it as its grammar."""
    key, _, value = text.partition("=")
    name = key.lstrip("+")
    path = SHORT_KEYS[name].path if name in SHORT_KEYS else name
    typed = path in AS_TYPED or name.startswith("cluster.environment.") or (name == "cluster" and _file(value))
    if not typed or value in ("", "null") or value[0] in "'\"":
        return text
    return f"{key}={quoted(value)}"


def quoted(text: str) -> str:
    """Return a text that Hydra's grammar reads as itself."""
    return f'"{text.replace(chr(34), chr(92) + chr(34))}"'


def _file(cluster: str) -> bool:
    """Whether the value of `cluster=` is a file and not one of the group's options."""
    return "/" in cluster or cluster.endswith((".yaml", ".yml"))
