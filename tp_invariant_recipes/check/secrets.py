"""No configured value may hold a secret, since what is configured is written down. None is shown, only its key."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from tp_invariant_recipes.check.rule import Rule, value_of
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.numerics.mode import STOCK
from tp_invariant_recipes.settings.environment import NAME, changing_bits
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.secrets import holds, named, redacted

_shown = cache(redacted)  # of names of fields, which are the same in each configuration


def _held(sections: Any, path: str) -> Iterator[Problem]:
    if isinstance(sections, dict):
        for name, value in sections.items():
            inner = f"{path}.{_shown(str(name))}".removeprefix(".")
            if path == "cluster.environment" and named(str(name)):
                continue  # check/secrets.py refuses it
            if path.endswith("_tags") and named(str(name)):
                yield _refusal(inner)
            else:
                yield from _held(value, inner)
    elif isinstance(sections, list | tuple):
        for value in sections:
            yield from _held(value, path)
    elif isinstance(sections, str) and holds(sections):
        yield _refusal(path)


def _refusal(path: str) -> Problem:
    return Problem(
        path,
        "holds what looks like a secret, and what is configured is written down",
        "set it in a variable where you start the run, and for a job name that in cluster.forward",
    )


RULES: tuple[Rule[RunConfig], ...] = (Rule(lambda config: [*dict.fromkeys(_held(config.sections, ""))]),)


# The rules of a cluster's environment variables, and of the limit on silence. None shows the value of a secret.


def _unnamed(config: RunConfig) -> Iterator[Problem]:
    for name in config.cluster.environment:
        if not NAME.fullmatch(name):
            yield Problem("cluster.environment", f"{name!r} is no name of a variable")


def _secret(config: RunConfig) -> Iterator[Problem]:
    text = "looks like a secret, and what is configured is written down"
    solve = "set it where you start the run, and for a job name it in cluster.forward"
    for name in filter(named, config.cluster.environment):
        yield Problem(f"cluster.environment.{name}", text, solve)


VARIABLE_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(lambda t: isinstance(t.run.hang_timeout, int) and t.run.hang_timeout < 1,
        "must be at least 1 second, auto, or off", head=value_of("run.hang_timeout")),
    Rule(_unnamed),
    Rule(_secret),
    Rule(lambda t: changing_bits(t.device.kind, t.cluster.environment), needs=lambda t: t.numerics.mode != STOCK),
)  # fmt: skip
