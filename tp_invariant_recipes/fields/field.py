# SPDX-License-Identifier: Apache-2.0
"""A row of the catalogue: a field of Bridge, what it may be, and why."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class Range:
    """What a finite number may be. words: what follows "KEY=VALUE: must be"."""

    words: str
    holds: Callable[[float], bool]


NOT_NEGATIVE = Range("at least 0", lambda n: n >= 0)
COUNT = Range("at least 1", lambda n: n >= 1)
POSITIVE = Range("above 0", lambda n: n > 0)
SHARE = Range("from 0 to 1", lambda n: 0 <= n <= 1)
BELOW_1 = Range("at least 0 and below 1", lambda n: 0 <= n < 1)
PART = Range("above 0 and at most 1", lambda n: 0 < n <= 1)
# -1 stands for "none" or "all", the number may well be negative, or it has a rule of its own.
SIGNED = Range("a finite number", lambda n: True)
# numpy takes seeds below 2**32, and Megatron adds 100 for each pipeline stage.
SEED = Range(f"from 1 to {2**32 - 2**24}", lambda n: 1 <= n <= 2**32 - 2**24)
NICE = Range("from -20 to 19", lambda n: -20 <= n <= 19)  # of a process, as in setpriority(2)
PORT = Range("from 1 to 65535", lambda n: 1 <= n <= 65535)


NOT_SET = object()


@dataclass(frozen=True)
class Values:
    """Values that a field may have.

    accepts: whether a value is one of them. remedy: what to set instead; {key} stands for the field.
    """

    accepts: Callable[[Any], bool]
    remedy: str


def only(*values: Any) -> Values:
    """Return these values alone. To Python True is 1, and False is 0; here they are not."""

    def accepts(value: Any) -> bool:
        return any(_plain(value) == v and isinstance(value, bool) is isinstance(v, bool) for v in values)

    return Values(accepts, "{key}=" + " or ".join(map(as_text, values)))


def _plain(value: Any) -> Any:
    """Get a list as a tuple, a dtype of torch and an enumeration by name, so that a tree's value equals an object's."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, Enum):
        return value.name
    return str(value).removeprefix("torch.") if isinstance(value, str) or type(value).__name__ == "dtype" else value


def as_text(value: Any) -> str:
    """Return a value as the command line has it."""
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
EMPTY = Values(lambda value: not value, "leave {key} unset")
OFF = only(False)
ON = only(True)
NULL = only(None)

# The reasons of fields that change no bits in any mode: they are no part of a run's identity (config/fingerprint.py).
READS = "it only reads"
BYTES = "it only moves bytes"
TIME = "it only decides when"
PLACE = "it only decides where"
NO_BITS = (READS, BYTES, TIME, PLACE)

# The reason of a field that nobody has read.
UNKNOWN = "the invariant numerics do not know this field"


@dataclass(frozen=True)
class BridgeField:
    """A field of a section of Bridge.

    allowed:   its values with invariant numerics.
    why:       what it does to bits, so that other values are refused.
    range:     what a number must be under any numerics.
    adjust_to: what another value becomes where a recipe says it (`numerics.adjust`); NOT_SET: it is refused.
    fingerprint: whether two comparable runs have the same value (config/fingerprint.py).
    """

    allowed: Values
    why: str
    range: Range = NOT_NEGATIVE
    adjust_to: Any = NOT_SET
    fingerprint: bool = True

    @property
    def adjusts(self) -> bool:
        """Whether another value of a recipe is set right."""
        return self.adjust_to is not NOT_SET

    @property
    def compared(self) -> bool:
        """Whether it is part of a run's fingerprint: it may change bits, and says what is trained."""
        return self.fingerprint and self.why not in NO_BITS


@dataclass(frozen=True)
class BridgeSection:
    """The fields of a section by their names. otherwise: the row of those that are not named."""

    named: dict[str, BridgeField]
    otherwise: BridgeField

    def field(self, name: str) -> BridgeField:
        """Return the row of a field."""
        return self.named.get(name, self.otherwise)


def row(
    allowed: Values, names: str, why: str, range_: Range = NOT_NEGATIVE, *, adjust_to: Any = NOT_SET
) -> dict[str, BridgeField]:
    """Fields with one reason. names: separated by spaces; a ~ before those that are no part of a run's fingerprint."""
    return {
        name.removeprefix("~"): BridgeField(allowed, why, range_, adjust_to, fingerprint=name[0] != "~")
        for name in names.split()
    }


def section(*rows: dict[str, BridgeField], otherwise: BridgeField = BridgeField(NONE, UNKNOWN)) -> BridgeSection:
    """Return a section of these rows. ValueError: a field has two."""
    names = [name for fields in rows for name in fields]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two rows for {sorted(twice)}")
    return BridgeSection({name: field for fields in rows for name, field in fields.items()}, otherwise)
