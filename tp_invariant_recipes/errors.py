# SPDX-License-Identifier: Apache-2.0
"""The kinds of mistake a user can correct. The CLI prints the message on one screen and exits with status 2."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class TpiError(Exception):
    """Something the user can correct; the message says what and how.

    problems: the same one by one, for a caller that has more to list.
    """

    def __init__(self, message: str = "", problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


class Interrupted(TpiError):
    """Ctrl-C ended the command before its end; the message says what it leaves. Exit status 130 instead of 2."""


class ConfigError(TpiError):
    """The configuration is wrong; lists every problem and the key that corrects each."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a configuration.

    key:   the setting that it is about, as typed: "tp=3", "model.hidden_size"; "" where the text names several or none.
    text:  what is wrong.
    solve: the settings that solve it; "" where the text says it.
    stock: whether numerics=stock solves it, too.
    rule:  the name of the rule that is broken, for tests and programs.
    """

    key: str
    text: str
    solve: str = ""
    stock: bool = False
    rule: str = ""

    def __str__(self) -> str:
        whole = f"{self.key}: {self.text}" if self.key else self.text
        return f"{whole}; {self.solve}" if self.solve else whole


class Line(str):
    """A problem as a line of a message, which keeps the name of its rule."""

    rule: str = ""

    @classmethod
    def of(cls, problem: Problem) -> "Line":
        """Return the line of a problem."""
        line = cls(problem)
        line.rule = problem.rule
        return line


# An entry of a ConfigError's problems that is none itself: what solves all those of numerics=tree and numerics=gather.
OR_STOCK = "or numerics=stock"


def lines(problems: Iterable[Problem]) -> list[str]:
    """Return the problems of a ConfigError: a line each, and OR_STOCK where that avoids some of them."""
    listed = [*problems]
    return [*map(Line.of, listed), *([OR_STOCK] if any(problem.stock for problem in listed) else [])]


def listed(problems: Sequence[str]) -> str:
    """One message for all problems."""
    each = [problem for problem in problems if problem != OR_STOCK]
    closing = OR_STOCK in problems
    if len(each) == 1:
        return f"{each[0]}, {OR_STOCK}" if closing else each[0]
    lines = [f"{len(each)} problems in this configuration:", *(f"  - {problem}" for problem in each)]
    return "\n".join([*lines, f"for the invariant numerics: change these, {OR_STOCK}"] if closing else lines)


def refuse(problems: Sequence[str]) -> None:
    """Raise ConfigError that lists these problems, if there are any."""
    if problems:
        raise ConfigError(listed(problems), problems)


class DataError(TpiError):
    """Training data is missing, unreadable, empty or not what it claims to be."""


class RunError(TpiError):
    """A run could not start, or one of its ranks died."""


class HardwareFault(RunError):
    """A processor has computed or kept corrupted values (docs/guard.md)."""


class CheckpointError(TpiError):
    """A checkpoint is damaged, incomplete or belongs to another run."""


class LedgerError(TpiError):
    """A ledger cannot be read or continued."""


def reason(error: BaseException) -> str:
    """Why something failed, without a number of an error, a path that the message names, or Python's words."""
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON, from character {error.colno} on"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8, from byte {error.start + 1} on"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
