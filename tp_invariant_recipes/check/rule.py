"""The one shape of a rule, and what a broken rule says."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tp_invariant_recipes.errors import OR_STOCK

_KEY = re.compile(r"[A-Za-z_][\w.]*")


class RulePhase(IntEnum):
    """What a rule is about."""

    TYPED = 1  # one override, as typed
    FIELDS = 2  # settings that must fit each other in any layout
    LAYOUT = 3  # ranks, the model and the batch
    FEATURES = 4  # what a feature, or a mode of numerics, covers
    MACHINE = 5  # what a machine, a job or a file lacks


@dataclass(frozen=True)
class Problem:
    """What is wrong with a configuration.

    key:   the setting that the text begins with, such as "tp" or "model.hidden_size"; "" for other texts.
    text:  what is wrong.
    solve: the settings that solve it; "" where the text says it.
    stock: whether numerics=stock solves it, too.
    """

    key: str
    text: str
    solve: str
    stock: bool = False

    @classmethod
    def read(cls, line: str, *, stock: bool = False) -> "Problem":
        """Read "KEY=VALUE: text; solution"."""
        text, _, solve = line.partition("; ")
        match = _KEY.match(text)
        return cls(match[0] if match else "", text, solve, stock)

    def __str__(self) -> str:
        return f"{self.text}; {self.solve}" if self.solve else self.text


@dataclass(frozen=True)
class Rule[Subject]:
    """A rule of a subject: of a RunConfig, or of a run as planned on a machine.

    phase: what it is about.
    test:  returns what is wrong, a text or several; or, with `why`, anything that is true where the rule is broken.
    why:   "what is wrong; what solves it", for a test that returns no text.
    needs: whether the rule is about a subject; a test may rely on it.
    head:  the setting that the rule is about, as in "guard=shadow"; each text begins with it.
    stock: whether numerics=stock avoids the rule.
    """

    phase: RulePhase
    test: Callable[[Subject], Any]
    why: str = ""
    needs: Callable[[Subject], Any] = lambda subject: True
    head: Callable[[Subject], str] | None = None
    stock: bool = False

    def broken(self, subject: Subject) -> Any:
        """Return what the test returns; None: the rule is not about the subject."""
        return self.test(subject) if self.needs(subject) else None

    def problems(self, subject: Subject) -> list[Problem]:
        """Return what is wrong, in the order of the texts."""
        broken = self.broken(subject)
        if not broken:
            return []
        texts = [self.why] if self.why else [broken] if isinstance(broken, str) else broken
        head = f"{self.head(subject)}: " if self.head else ""
        return [Problem.read(f"{head}{text}", stock=self.stock) for text in texts]


def broken_rules[Subject](subject: Subject, rules: Iterable[Rule[Subject]]) -> list[Problem]:
    """Everything that the rules say of a subject, in their order."""
    return [problem for rule in rules for problem in rule.problems(subject)]


def lines(problems: Iterable[Problem]) -> list[str]:
    """Return the problems of a ConfigError: a line each, and OR_STOCK where that avoids some of them."""
    listed = [*problems]
    return [*map(str, listed), *([OR_STOCK] if any(problem.stock for problem in listed) else [])]
