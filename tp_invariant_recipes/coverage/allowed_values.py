"""Values that a field may have, and the groups that the lists of `allowed_fields.py` have."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

Rows = dict[str, tuple["Values", str]]


@dataclass(frozen=True)
class Values:
    """Values that a field may have.

    accepts: whether a value is one of them. remedy: what to set instead; {key} stands for the field.
    """

    accepts: Callable[[Any], bool]
    remedy: str


def only(*values: Any) -> Values:
    """These values alone. To Python True is 1, and False is 0; here they are not."""
    return Values(
        lambda value: any(_plain(value) == v and isinstance(value, bool) is isinstance(v, bool) for v in values),
        "{key}=" + " or ".join(map(as_text, values)),
    )


def _plain(value: Any) -> Any:
    """A list as a tuple, a dtype of torch and an enumeration by name, so that a tree's value equals an object's."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, Enum):
        return value.name
    return str(value).removeprefix("torch.") if isinstance(value, str) or type(value).__name__ == "dtype" else value


def as_text(value: Any) -> str:
    """A value as the command line has it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(list(value)) if isinstance(value, list | tuple) else str(_plain(value))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))


NUMBER = Values(_is_number, "give {key} a finite number")
THRESHOLD = Values(lambda value: value == math.inf or _is_number(value), "give {key} a number")
BOOL = Values(lambda value: isinstance(value, bool), "{key}=true or false")
ANY = Values(lambda value: True, "")
NONE = Values(lambda value: False, "leave {key} unset")
OFF = only(False)

# The reasons of fields that change no bits in any mode: they are no part of a run's identity (config/identity.py).
READS = "it only reads"
BYTES = "it only moves bytes"
TIME = "it only decides when"
PLACE = "it only decides where"
NO_BITS = (READS, BYTES, TIME, PLACE)


def rows(*groups: tuple[Values, str, str]) -> Rows:
    """A table of fields from groups: values, reason, and names separated by spaces."""
    return {name: (values, why) for values, why, names in groups for name in names.split()}
