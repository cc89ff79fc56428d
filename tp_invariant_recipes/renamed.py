"""Keys that have another name now. The old names are understood for one release, in commands and files."""

import sys
from collections.abc import Mapping
from typing import Any

# Old dotted path -> new one, in the same section.
RENAMED = {
    "slurm.meet": "slurm.rendezvous_timeout",
    "numerics.shards": "numerics.virtual_shards",
}

_said: set[str] = set()


def hint(old: str, new: str) -> None:
    """Say on standard error, once a process, that a name is going."""
    if old not in _said:
        _said.add(old)
        print(f"{old} is now {new}; the old name goes with the next release", file=sys.stderr)


def section(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a section that an earlier version has recorded, by their present names."""
    return {_field(name, field): value for field, value in fields.items()}


def override(text: str) -> str:
    """`key=value` that an earlier version has recorded, with the key's present name."""
    key, is_, value = text.partition("=")
    path = key.lstrip("+")
    return f"{key[: len(key) - len(path)]}{RENAMED.get(path, path)}{is_}{value}"


def _field(name: str, field: str) -> str:
    return RENAMED.get(f"{name}.{field}", f"{name}.{field}").partition(".")[2]
