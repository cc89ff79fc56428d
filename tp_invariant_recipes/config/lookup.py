"""Parts of a configuration by their keys, and the difference of two configurations."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tp_invariant_recipes.config.identity import flat, identity
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.settings.nearest import nearest
from tp_invariant_recipes.settings.run_config import RunConfig

NOT_SET = "not set"


class Changed(NamedTuple):
    """A key with two values. comparable: whether runs that differ there are comparable."""

    key: str
    a: Any
    b: Any
    comparable: bool


def at(sections: Mapping[str, Any], key: str) -> Any:
    """Return what a configuration has at a key: a section, the dotted path of a field, or a short key.

    Raises ConfigError.
    """
    path = SHORT_KEYS[key].path if key in SHORT_KEYS else key
    value: Any = sections
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            known = (*sections, *flat(sections), *SHORT_KEYS)
            raise ConfigError(f"--key {key}: this configuration does not set it{nearest(key, known)}")
        value = value[name]
    return value


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Changed]:
    """Return the keys at which two configurations differ, in the order of the first."""
    flats = flat(a), flat(b)
    identities = identity(RunConfig(a), None), identity(RunConfig(b), None)
    kept = {key for key in (*identities[0], *identities[1]) if identities[0].get(key) != identities[1].get(key)}
    keys = dict.fromkeys((*flats[0], *flats[1]))
    pairs = ((key, *(values.get(key, NOT_SET) for values in flats)) for key in keys)
    return [
        Changed(key, in_a, in_b, not any(key == prefix or prefix.startswith(f"{key}.") for prefix in kept))
        for key, in_a, in_b in pairs
        if (in_a, type(in_a)) != (in_b, type(in_b))
    ]
