# SPDX-License-Identifier: Apache-2.0
"""What the rules of one table say of a configuration, as the lines of a message."""

from types import ModuleType

from tp_invariant_recipes.check.invariant import invariance
from tp_invariant_recipes.check.rule import broken_rules
from tp_invariant_recipes.errors import lines
from tp_invariant_recipes.settings.run_config import RunConfig


def table_problems(table: ModuleType, config: RunConfig) -> list[str]:
    """table: a module with RULES."""
    return lines(broken_rules(config, table.RULES))


def limits_of(config: RunConfig) -> list[str]:
    """What is beyond the invariant numerics, without the way to avoid all of it."""
    return [str(problem) for problem in broken_rules(config, invariance.RULES)]


def allow(words: str) -> None:
    """Let every configuration pass whose problem has these words; to be run before a command."""
    from tp_invariant_recipes.check import configuration

    original = configuration.broken_rules
    configuration.broken_rules = lambda *args: [p for p in original(*args) if words not in str(p)]
