"""What an engine of rollouts covers: a model of which a cached row is shown to have the bits of the whole pass."""

from typing import NamedTuple

from tp_invariant_recipes.check.rule import Rule, broken_rules
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.settings import low_precision
from tp_invariant_recipes.settings.run_config import RunConfig


class RolloutModel(NamedTuple):
    """What the rules read, of a configuration or of Megatron's model. ahead: whether it has multi-token prediction."""

    numerics: str
    pp: int
    fp8: bool
    ahead: bool

    def problems(self) -> list[str]:
        """Return what the engine does not cover, a line each."""
        return [str(problem) for problem in broken_rules(self, RULES)]


def _inexact(model: RolloutModel) -> bool:
    arithmetic = mode.find(model.numerics)
    return arithmetic is None or not arithmetic.any_machine


RULES: tuple[Rule[RolloutModel], ...] = (
    Rule(
        _inexact,
        "a cached row is not shown to have the bits of a whole pass",
        "numerics=portable",
        head=lambda model: f"numerics={model.numerics}",
    ),
    Rule(
        lambda model: model.pp > 1,
        "a rank of rollouts computes all layers",
        "pp=1, and a larger tp",
        head=lambda model: f"pp={model.pp}",
    ),
    Rule(
        lambda model: model.fp8,
        "FP8 scales a tensor by all tokens of a pass, so rows depend on each other",
        "precision=bf16",
        head=lambda model: "precision",
    ),
    Rule(
        lambda model: model.ahead,
        "layers of multi-token prediction have no cache",
        "model.mtp_num_layers=null",
        head=lambda model: "model.mtp_num_layers",
    ),
)


def problems(config: RunConfig) -> list[str]:
    """Return what keeps this configuration from generating, beside what keeps it from a forward pass; a line each."""
    fp8, ahead = bool(low_precision.enabled(config)), bool(config.shape.depths)
    return RolloutModel(config.numerics.mode, config.layout.pp, fp8, ahead).problems()
