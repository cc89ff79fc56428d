"""What an engine of rollouts covers: a model of which a cached row is shown to have the bits of the whole pass."""

from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.settings import low_precision
from tp_invariant_recipes.settings.run_config import RunConfig


def uncovered(numerics: str, pp: int, *, fp8: bool, ahead: bool) -> list[str]:
    """Return what the engine does not cover, a line each. ahead: whether a model has multi-token prediction."""
    arithmetic = mode.find(numerics)
    inexact = arithmetic is None or not arithmetic.any_machine
    cached = "a cached row is not shown to have the bits of a whole pass"
    scales = "FP8 scales a tensor by all tokens of a pass, so rows depend on each other"
    layers = "layers of multi-token prediction have no cache"
    problems = (
        (inexact, Problem(f"numerics={numerics}", cached, "numerics=portable, with the switch TPI_NUMERICS=portable")),
        (pp > 1, Problem(f"pp={pp}", "a rank of rollouts computes all layers", "pp=1, and a larger tp")),
        (fp8, Problem("precision", scales, "precision=bf16")),
        (ahead, Problem("model.mtp_num_layers", layers, "model.mtp_num_layers=null")),
    )
    return [str(problem) for broken, problem in problems if broken]


def problems(config: RunConfig) -> list[str]:
    """Return what keeps this configuration from generating, beside what keeps it from a forward pass; a line each."""
    fp8, ahead = bool(low_precision.enabled(config)), bool(config.shape.depths)
    return uncovered(config.numerics.mode, config.layout.pp, fp8=fp8, ahead=ahead)
