# SPDX-License-Identifier: Apache-2.0
"""The one shape of a rule, and of a limit of the invariant numerics, which numerics=stock avoids."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.fields.field import as_text
from tp_invariant_recipes.settings import cuda_graphs
from tp_invariant_recipes.settings.run_config import RunConfig


@dataclass(frozen=True)
class Adjusted:
    """What a field of a recipe becomes where it breaks a rule, which costs no part of the result (`numerics.adjust`).

    path: of the field. value: what it becomes, or a function of the run. unset: whether a field that the recipe does
    not set becomes it, too. why: where the text of the rule does not say it.
    """

    path: str
    value: Any
    unset: bool = False
    why: str = ""


def becomes(value: Any, paths: str, *, unset: bool = False, why: str = "") -> tuple[Adjusted, ...]:
    """Return what fields become. paths: separated by spaces."""
    return tuple(Adjusted(path, value, unset, why) for path in paths.split())


@dataclass(frozen=True)
class Rule[Subject]:
    """A rule of a subject: of a RunConfig, or of a run as planned on a machine.

    test:  returns a Problem, several or None; or, with `text`, anything that is true where the rule is broken.
    of:    what of a subject the test takes, beside itself or in its place.
    text, solve: of the problem, for a test that returns none.
    needs: whether the rule is about a subject; a test may rely on it.
    head:  the setting that the rule is about, as in "guard=shadow": the key of its problems, or before their keys.
    stock: whether numerics=stock avoids the rule.
    adjust: what the invariant numerics set otherwise of a recipe that breaks the rule, in this order.
    """

    test: Callable[[Subject], Any] | Callable[..., Any]
    text: str = ""
    solve: str = ""
    needs: Callable[[Subject], Any] = lambda subject: True
    head: Callable[[Subject], str] | None = None
    stock: bool = False
    adjust: tuple[Adjusted, ...] = ()
    of: Callable[[Subject], tuple[Any, ...]] = lambda subject: (subject,)

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
        return self.test(*self.of(subject)) if self.needs(subject) else None

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


Test = Callable[[RunConfig], Any]


def limit(test: Test, text: str = "", solve: str = "", **more: Any) -> Rule[RunConfig]:
    """Return a limit of every run with invariant numerics."""
    return limit_of(lambda t: True, test, text, solve, **more)


def limit_of(needs: Test, test: Callable[..., Any], text: str = "", solve: str = "", **more: Any) -> Rule[RunConfig]:
    """Return a limit of those runs to which something applies."""
    return Rule(
        test,
        text,
        solve,
        needs=lambda t: t.numerics.invariant and needs(t),
        head=lambda t: f"numerics={t.numerics.mode}",
        stock=True,
        **more,
    )


def lacks(feature: str) -> Test:
    """Whether a run's mode has no invariant version of one of the features of numerics/mode.py."""
    return lambda t: not t.numerics.covers(feature)


def cuts_sequences(config: RunConfig) -> bool:
    """Whether sequences are cut, on one rank or several."""
    return config.layout.cp > 1 or (config.numerics.context_shards or 1) > 1


def has(field: str) -> Test:
    """Whether a field of the model is set to anything."""
    return lambda t: t.model.get(field)


def name_of(value: Any) -> str:
    """Return the last part of the name of a function or an enumeration: text in a tree, the object elsewhere."""
    text = value if isinstance(value, str) else getattr(value, "__name__", getattr(value, "name", ""))
    return str(text).rpartition(".")[2]


def uncut(what: str) -> tuple[Test, str, str]:
    """Of what takes whole sequences. what: with its verb, such as "LoRA has"."""
    return cuts_sequences, f"{what} no version with context shards", "cp=1, and leave numerics.context_shards out"


def uncaptured(what: str, instead: str = "") -> tuple[Test, str, str]:
    """Of what no CUDA graph holds. what: with its verb, such as "adapters have". instead: another key, or none."""
    text = f"{what} not been captured in CUDA graphs"
    return lambda t: cuda_graphs.requested(t.model), text, f"cuda_graph=off{instead}"


def unsplit(what: str) -> tuple[Test, str, str]:
    """Of what takes part in tensor parallelism with sequence parallelism alone. what: with its verb."""

    def split(config: RunConfig) -> bool:
        return config.layout.tp > 1 and not config.layout.sp

    return split, f"{what} sequence parallelism", "sp=true"
