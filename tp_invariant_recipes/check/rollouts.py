"""What an engine of rollouts covers: a model of which a cached row is shown to have the bits of the whole pass."""

from tp_invariant_recipes.check.rule import Rule, RulePhase, broken_rules, lines
from tp_invariant_recipes.settings import low_precision
from tp_invariant_recipes.settings.run_config import RunConfig


def _other_numerics(config: RunConfig) -> str | None:
    arithmetic = config.numerics.arithmetic
    if arithmetic is not None and arithmetic.any_machine:
        return None
    return f"numerics={config.numerics.mode}: a cached row is not shown to have the bits of a whole pass; {PORTABLE}"


def _stages(config: RunConfig) -> str | None:
    pp = config.layout.pp
    return f"pp={pp}: a rank of rollouts computes all layers; pp=1, and a larger tp" if pp > 1 else None


PORTABLE = "numerics=portable"
FP8 = "precision: FP8 scales a tensor by all tokens of a pass, so rows depend on each other; precision=bf16"
AHEAD = "model.mtp_num_layers: layers of multi-token prediction have no cache; model.mtp_num_layers=null"

RULES: tuple[Rule[RunConfig], ...] = (
    Rule(RulePhase.FEATURES, _other_numerics),
    Rule(RulePhase.FEATURES, _stages),
    Rule(RulePhase.FEATURES, low_precision.enabled, FP8),
    Rule(RulePhase.FEATURES, lambda config: config.model.get("mtp_num_layers"), AHEAD),
)


def problems(config: RunConfig) -> list[str]:
    """Return what keeps this configuration from generating, beside what keeps it from a forward pass; a line each."""
    return lines(broken_rules(config, RULES))
