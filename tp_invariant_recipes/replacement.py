"""Replace attributes of installed packages for the length of a `with` block, and put them back."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
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
        """The object that holds the attribute, and the attribute's name."""
        module, _, path = self.target.partition(":")
        *parents, name = path.split(".")
        holder: Any = import_module(module)
        for parent in parents:
            holder = getattr(holder, parent)
        return holder, name


@contextmanager
def applied(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Apply the replacements in order; on leaving, restore the originals in reverse.

    Raises AttributeError when a target does not exist: a replacement that no longer fits must not pass unseen.
    """
    undo: list[tuple[Any, str, Any, bool]] = []
    try:
        for replacement in replacements:
            holder, name = replacement.owner()
            original = getattr(holder, name)
            # A staticmethod or property must go back as it was, and what a base class holds must stay there.
            inherited = name not in vars(holder)
            stored = vars(holder).get(name)
            setattr(holder, name, replacement.make(original))
            undo.append((holder, name, stored, inherited))
        yield
    finally:
        for holder, name, stored, inherited in reversed(undo):
            if inherited:
                delattr(holder, name)
            else:
                setattr(holder, name, stored)
