"""The rules of a cluster's environment variables, and of the limit on silence. None shows the value of a secret."""

from collections.abc import Iterator

from tp_invariant_recipes.check.rule import Rule, value_of
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings.environment import NAME, changing_bits
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.secrets import named


def _unnamed(config: RunConfig) -> Iterator[Problem]:
    for name in config.cluster.environment:
        if not NAME.fullmatch(name):
            yield Problem("cluster.environment", f"{name!r} is no name of a variable")


def _secret(config: RunConfig) -> Iterator[Problem]:
    text = "looks like a secret, and what is configured is written down"
    solve = "set it where you start the run, and for a job name it in cluster.forward"
    for name in filter(named, config.cluster.environment):
        yield Problem(f"cluster.environment.{name}", text, solve)


RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        lambda t: isinstance(t.run.hang_timeout, int) and t.run.hang_timeout < 1,
        "must be at least 1 second, auto, or off",
        head=value_of("run.hang_timeout"),
    ),
    Rule(_unnamed),
    Rule(_secret),
    Rule(lambda config: changing_bits(config.device.kind, config.cluster.environment)),
)
