# SPDX-License-Identifier: Apache-2.0
"""Replace attributes of installed packages, for good or for the length of a `with` block."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True)
class Replacement:
    """One attribute of one module.

    target: "package.module:attribute.path".
    make:   called with the original, returns what stands in its place.
    why:    what would go wrong without it.
    """

    target: str
    make: Callable[[Any], Any]
    why: str

    def owner(self) -> tuple[Any, str]:
        """Return the object that holds the attribute, and the attribute's name."""
        module, _, path = self.target.partition(":")
        *parents, name = path.split(".")
        holder: Any = import_module(module)
        for parent in parents:
            holder = getattr(holder, parent)
        return holder, name


def resolve_own(path: str) -> Any:
    """Return what MODULE:NAME names below this package, such as "numerics.sums.grad_norm:clip_by_powers_of_two"."""
    return resolve_name(f"tp_invariant_recipes.{path}")


def instead(target: str, path: str, why: str) -> Replacement:
    """Return the row that replaces a target by `resolve_own(path)`. The lookup is late: most paths import torch."""
    return Replacement(target, lambda original: resolve_own(path), why)


def wrapped(target: str, path: str, why: str, *settings: Any) -> Replacement:
    """Return the row that replaces a target by `resolve_own(path)(original, *settings)`."""
    return Replacement(target, lambda original: resolve_own(path)(original, *settings), why)


def apply(replacements: Iterable[Replacement]) -> Callable[[], None]:
    """Apply the replacements in order, for good.

    returns: what restores the originals, in reverse.
    Raises AttributeError when a target does not exist: a replacement that no longer fits must not pass unseen. Then
    nothing stays replaced.
    """
    with ExitStack() as undo:
        for replacement in replacements:
            holder, name = replacement.owner()
            original = getattr(holder, name)
            # A staticmethod or property must go back as it was, and what a base class holds must stay there.
            stored = vars(holder).get(name)
            restore = partial(setattr, holder, name, stored) if name in vars(holder) else partial(delattr, holder, name)
            setattr(holder, name, replacement.make(original))
            undo.callback(restore)
        return undo.pop_all().close


@contextmanager
def applied(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Apply the replacements for the length of a `with` block."""
    restore = apply(replacements)
    try:
        yield
    finally:
        restore()
