"""One row of the table of what the invariant numerics cannot cover."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Tree = dict[str, Any]


@dataclass(frozen=True)
class Limit:
    """wrong: whether the tree is beyond what is covered. why: what there is no invariant version of yet."""

    wrong: Callable[[Tree], bool]
    why: str


def asked(field: str) -> Callable[[Tree], bool]:
    """Whether a field of the model is set to anything."""
    return lambda t: bool(t["model"].get(field))
