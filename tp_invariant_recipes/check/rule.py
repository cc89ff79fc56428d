"""The one shape of a rule."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.fields.field import as_text
from tp_invariant_recipes.settings.run_config import RunConfig


@dataclass(frozen=True)
class Rule[Subject]:
    """A rule of a subject: of a RunConfig, or of a run as planned on a machine.

    test:  returns a Problem, several or None; or, with `text`, anything that is true where the rule is broken.
    text, solve: of the problem, for a test that returns none.
    needs: whether the rule is about a subject; a test may rely on it.
    head:  the setting that the rule is about, as in "guard=shadow": the key of its problems, or before their keys.
    stock: whether numerics=stock avoids the rule.
    """

    test: Callable[[Subject], Any]
    text: str = ""
    solve: str = ""
    needs: Callable[[Subject], Any] = lambda subject: True
    head: Callable[[Subject], str] | None = None
    stock: bool = False

    @property
    def name(self) -> str:
        """The function that tests it; of a comparison, the field that its texts name, or its first words."""
        function = getattr(self.test, "func", self.test).__name__.strip("_")
        if function != "<lambda>":
            return function
        texts = f"{self.solve} {self.text}"
        key = re.search(r"([\w.]+)=", texts) or re.search(r"\b([a-z]+\.\w+)", texts)
        return key[1].rpartition(".")[2] if key else "_".join(re.findall(r"\w+", self.text)[:4])

    def broken(self, subject: Subject) -> Any:
        """Return what the test returns; None: the rule is not about the subject."""
        return self.test(subject) if self.needs(subject) else None

    def problems(self, subject: Subject) -> list[Problem]:
        """Return what is wrong, in the order of the texts."""
        broken = self.broken(subject)
        if not broken:
            return []
        given = (
            [Problem("", self.text, self.solve)] if self.text else [broken] if isinstance(broken, Problem) else broken
        )
        head = [self.head(subject)] if self.head else []
        return [
            replace(
                problem,
                key=": ".join([*head, *filter(None, [problem.key])]),
                stock=self.stock,
                rule=problem.rule or self.name,
            )
            for problem in given
        ]


def value_of(path: str) -> Callable[[RunConfig], str]:
    """Return the head of a rule that is about a field: "optimizer.lr=1"."""
    return lambda config: f"{path}={as_text(config.at(path))}"


def broken_rules[Subject](subject: Subject, rules: Iterable[Rule[Subject]]) -> list[Problem]:
    """Everything that the rules say of a subject, in their order."""
    return [problem for rule in rules for problem in rule.problems(subject)]
