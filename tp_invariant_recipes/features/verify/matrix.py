"""Expand overrides with several values to one run per combination."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from hydra.core.override_parser.types import Override as HydrasOverride
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException

from tp_invariant_recipes.config.overrides import Override
from tp_invariant_recipes.runs.matrix_dir import Axis
from tp_invariant_recipes.settings import conf_files

MOST = 100  # cells; more are most likely a typing error, and each costs a training

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._+-]+")
_LONGEST_NAME = 100  # characters of a directory's name


@dataclass(frozen=True)
class Choice:
    """One value of every axis.

    name:      of its run directory, such as "tp2-sp-false"; label: for people, such as "tp=2 sp=false".
    values:    one per axis.
    overrides: all overrides of its run; no key has several values.
    """

    name: str
    label: str
    values: tuple[str, ...]
    overrides: tuple[Override, ...]


def spread(overrides: Sequence[Override], problems: list[str]) -> tuple[tuple[Axis, ...], tuple[Choice, ...]]:
    """Return the keys with several values, and every combination: the last key changes fastest.

    An override with wrong values is left out, and `problems` says why; all else is left for `compose`.
    """
    places: dict[int, Axis] = {}
    kept: list[Override | None] = list(overrides)
    for place, override in enumerate(overrides):
        if override.several is None:
            continue
        try:
            values = _values(override.several)
        except ValueError as error:
            problems.append(f"{override.text}: {error}")
            kept[place] = None
        else:
            places[place] = Axis(override.key, values)
    # The later value of a key would win, and cells with different names would be equal.
    fields = [override.field for override in overrides]
    twice = [place for place in places if fields.count(fields[place]) > 1]
    problems += [f"{overrides[place].key} has several values and is given twice" for place in twice]
    combinations = list(islice(product(*(axis.values for axis in places.values())), MOST + 1))
    if len(combinations) > MOST:
        problems.append(
            f"{' '.join(overrides[place].text for place in places)}: more than {MOST} cells; give fewer values"
        )
        return tuple(places.values()), ()
    return tuple(places.values()), tuple(_choices(kept, places, combinations))


def _values(parsed: HydrasOverride) -> tuple[str, ...]:
    """Return the values of an override. ValueError: it is not a list of values, is empty, or repeats a value."""
    if parsed.value_type is ValueType.GLOB_CHOICE_SWEEP:
        value: Any = parsed.value()
        values = value.filter(list(conf_files.groups().get(parsed.key_or_group, ())))
    else:
        try:
            values = list(islice(parsed.sweep_string_iterator(), MOST + 1))
        except (HydraException, ValueError) as error:
            raise ValueError(f"{error}; list the values, as in {parsed.key_or_group}=1,2,4") from None
    values = [value.lower() if value in ("True", "False") else value for value in values]
    twice = [value for value in dict.fromkeys(values) if values.count(value) > 1]
    if twice:
        raise ValueError(f"{', '.join(twice)} is given twice")
    if not values:
        raise ValueError("gives no value")
    return tuple(values)


def _choices(
    overrides: Sequence[Override | None], places: dict[int, Axis], combinations: Iterable[tuple[str, ...]]
) -> Iterable[Choice]:
    names: set[str] = set()
    for values in combinations:
        pairs = [(axis.key, value) for axis, value in zip(places.values(), values, strict=True)]
        chosen = dict(zip(places, values, strict=True))
        single = [
            override.with_value(chosen[n]) if override and n in chosen else override
            for n, override in enumerate(overrides)
        ]
        name = "-".join(_word(key, value) for key, value in pairs)[:_LONGEST_NAME]
        name = next(
            candidate for candidate in (name, *(f"{name}-{n}" for n in range(2, MOST + 2))) if candidate not in names
        )
        names.add(name)
        label = " ".join(f"{key}={value}" for key, value in pairs)
        yield Choice(name, label, values, tuple(override for override in single if override))


def _word(key: str, value: str) -> str:
    """Part of a name: tp=2 gives tp2, sp=false sp-false, model.attention_backend=unfused attention_backend-unfused."""
    last = key.rpartition(".")[2]
    return _NOT_IN_NAMES.sub("_", f"{last}{value}" if value.isdigit() else f"{last}-{value}")
