"""No configured value may hold a secret, since what is configured is written down. None is shown, only its key."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.secrets import holds, named, redacted

_shown = cache(redacted)  # of names of fields, which are the same in each configuration


def _held(sections: Any, path: str) -> Iterator[Problem]:
    if isinstance(sections, dict):
        for name, value in sections.items():
            inner = f"{path}.{_shown(str(name))}".removeprefix(".")
            if path == "cluster.environment" and named(str(name)):
                continue  # check/environment.py refuses it
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
