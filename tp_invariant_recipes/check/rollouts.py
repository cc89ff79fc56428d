"""What an engine of rollouts covers: a model of which a cached row is shown to have the bits of the whole pass."""

from tp_invariant_recipes.check.rule import Rule, broken_rules
from tp_invariant_recipes.errors import Problem, lines
from tp_invariant_recipes.settings import low_precision
from tp_invariant_recipes.settings.run_config import RunConfig


def _other_numerics(config: RunConfig) -> Problem | None:
    arithmetic = config.numerics.arithmetic
    if arithmetic is not None and arithmetic.any_machine:
        return None
    why = "a cached row is not shown to have the bits of a whole pass"
    return Problem(f"numerics={config.numerics.mode}", why, "numerics=portable")


RULES: tuple[Rule[RunConfig], ...] = (
    Rule(_other_numerics),
    Rule(
        lambda config: config.layout.pp > 1,
        "a rank of rollouts computes all layers",
        "pp=1, and a larger tp",
        head=lambda config: f"pp={config.layout.pp}",
    ),
    Rule(
        low_precision.enabled,
        "FP8 scales a tensor by all tokens of a pass, so rows depend on each other",
        "precision=bf16",
        head=lambda config: "precision",
    ),
    Rule(
        lambda config: config.shape.depths,
        "layers of multi-token prediction have no cache",
        "model.mtp_num_layers=null",
        head=lambda config: "model.mtp_num_layers",
    ),
)


def problems(config: RunConfig) -> list[str]:
    """Return what keeps this configuration from generating, beside what keeps it from a forward pass; a line each."""
    return lines(broken_rules(config, RULES))
