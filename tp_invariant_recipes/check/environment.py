"""The rules of a cluster's environment variables, and of the limit on silence. None shows the value of a secret."""

from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings.environment import NAME, changing_bits
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.secrets import named


def _unnamed(config: RunConfig) -> list[Problem]:
    names = config.cluster.environment
    return [
        Problem("cluster.environment", f"{name!r} is no name of a variable")
        for name in names
        if not NAME.fullmatch(name)
    ]


def _secret(config: RunConfig) -> list[Problem]:
    return [
        Problem(
            f"cluster.environment.{name}",
            "looks like a secret, and what is configured is written down",
            "set it where you start the run, and for a job name it in cluster.forward",
        )
        for name in config.cluster.environment
        if named(name)
    ]


def _hang_timeout(config: RunConfig) -> Problem | None:
    seconds = config.run.hang_timeout
    if isinstance(seconds, int) and seconds < 1:
        return Problem(f"run.hang_timeout={seconds}", "must be at least 1 second, auto, or off")
    return None


RULES: tuple[Rule[RunConfig], ...] = (
    Rule(_hang_timeout),
    Rule(_unnamed),
    Rule(_secret),
    Rule(lambda config: changing_bits(config.device.kind, config.cluster.environment)),
)
