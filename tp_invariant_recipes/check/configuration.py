"""All rules of a configuration, whatever machine it runs on."""

from tp_invariant_recipes.check import (
    adapters,
    cuda_graphs,
    environment,
    examples,
    guard,
    layout,
    precision,
    recipe,
    recording,
    relations,
    secrets,
    weights,
)
from tp_invariant_recipes.check.invariant import invariance
from tp_invariant_recipes.check.rule import Rule, broken_rules
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings.run_config import RunConfig

# In the order of messages.
RULES: tuple[Rule[RunConfig], ...] = (
    *layout.RULES,
    *relations.RULES,
    *invariance.RULES,
    *cuda_graphs.RULES,
    *precision.RULES,
    *recording.RULES,
    *guard.RULES,
    *environment.RULES,
    *secrets.RULES,
    *recipe.RULES,
    *examples.RULES,
    *adapters.RULES,
    *weights.RULES,
)


def check(config: RunConfig) -> list[Problem]:
    """Everything that is wrong with a configuration whose values have their types (config/compose.py)."""
    return broken_rules(config, RULES)
