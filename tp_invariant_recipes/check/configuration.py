"""All rules of a configuration, whatever machine it runs on."""

from tp_invariant_recipes.check import cuda_graphs, guard, layout, recipe, recording, relations
from tp_invariant_recipes.check import finetuning as finetuning_rules
from tp_invariant_recipes.check import secrets as secret_rules
from tp_invariant_recipes.check.invariant import invariance
from tp_invariant_recipes.check.rule import Rule, broken_rules
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings.run_config import RunConfig

# In the order of messages.
RULES: tuple[Rule[RunConfig], ...] = (
    *layout.RULES, *relations.RULES, *invariance.RULES, *cuda_graphs.RULES, *relations.PRECISION_RULES,
    *recording.RULES, *guard.RULES, *secret_rules.VARIABLE_RULES, *secret_rules.RULES, *recipe.RULES,
    *finetuning_rules.EXAMPLE_RULES, *finetuning_rules.ADAPTER_RULES, *relations.WEIGHTS_RULES,
)  # fmt: skip


def check(config: RunConfig) -> list[Problem]:
    """Everything that is wrong with a configuration whose values have their types (config/compose.py)."""
    return broken_rules(config, RULES)
