"""The rules of a cluster's environment variables, and of the limit on silence. None shows the value of a secret."""

from tp_invariant_recipes.check.rule import Rule, RulePhase
from tp_invariant_recipes.settings.environment import NAME, changing_bits
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.secrets import named


def _unnamed(config: RunConfig) -> list[str]:
    names = config.cluster.environment
    return [f"cluster.environment: {name!r} is no name of a variable" for name in names if not NAME.fullmatch(name)]


def _secret(config: RunConfig) -> list[str]:
    return [
        f"cluster.environment.{name}: looks like a secret, and what is configured is written down; set it where you "
        f"start the run, and for a job name it in cluster.forward"
        for name in config.cluster.environment
        if named(name)
    ]


def _hang_timeout(config: RunConfig) -> str | None:
    seconds = config.run.hang_timeout
    if isinstance(seconds, int) and seconds < 1:
        return f"run.hang_timeout={seconds}: must be at least 1 second, auto, or off"
    return None


RULES: tuple[Rule[RunConfig], ...] = (
    Rule(RulePhase.FIELDS, _hang_timeout),
    Rule(RulePhase.FEATURES, _unnamed),
    Rule(RulePhase.FEATURES, _secret),
    Rule(RulePhase.FEATURES, lambda config: changing_bits(config.device.kind, config.cluster.environment)),
)
