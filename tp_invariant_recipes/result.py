# SPDX-License-Identifier: Apache-2.0
"""What a command found, as a value: the command line prints it, and a program reads it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text

from tp_invariant_recipes.machine import terminal


class Result(ABC):
    """The base of every result: an exit status, `str()` as the command prints it, and JSON.

    indent: of the JSON; None: one line.
    """

    indent: ClassVar[int | None] = None

    @property
    @abstractmethod
    def exit_status(self) -> int:
        """0: identical, or done. 1: different. 2: no judgement is possible. 130: Ctrl-C ended it."""

    @abstractmethod
    def lines(self) -> Iterable[str | Text | Table]:
        """Return what the command prints, in order. A string is one line, which is never folded."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""

    def to_json(self) -> str:
        """Return the text that the command prints with `--json`."""
        return terminal.json_text(self.as_json(), self.indent)

    def __str__(self) -> str:
        """Return what the command prints where its output is a file."""
        return terminal.rendered(self.lines()).removesuffix("\n")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def __init_subclass__(cls) -> None:
        """Leave a dataclass this `__repr__`: pytest shows it of `assert result.identical`; all fields are pages."""
        if "__repr__" not in vars(cls):
            cls.__repr__ = Result.__repr__  # type: ignore[method-assign]

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self)}  # what a notebook shows
