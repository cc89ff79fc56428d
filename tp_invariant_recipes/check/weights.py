"""Settings that contradict weights from a folder of Hugging Face."""

from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings import peft
from tp_invariant_recipes.settings.run_config import RunConfig

# What must be off.
OFF = {
    "model.init_model_with_meta_device": "the parameters have memory",
    "ddp.use_megatron_fsdp": "they are sharded",
    "dist.use_torch_fsdp2": "they are sharded",
}


def _twice(config: RunConfig) -> Problem | None:
    both = f"weights={config.weights.folder} and checkpoint.pretrained_checkpoint"
    problem = Problem("", f"{both} both say where weights come from", "leave out one")
    return problem if config.at("checkpoint.pretrained_checkpoint") is not None else None


def _initial(config: RunConfig) -> Problem | None:
    # Adapters are new: the folder does not have them.
    if config.numerics.invariant or config.numerics.initial_weights != "invariant" or peft.adapts(config):
        return None
    return Problem("numerics.initial_weights=invariant", f"weights={config.weights.folder} has them", "leave out one")


def _fp8(config: RunConfig) -> Problem | None:
    precision = config.mixed_precision
    if not isinstance(precision, dict) or not (precision.get("fp8_param") or precision.get("fp8_param_gather")):
        return None
    solve = "mixed_precision.fp8_param_gather=false"
    return Problem(f"weights={config.weights.folder}", "weights are not imported into fp8", solve)


def _off(config: RunConfig) -> list[Problem]:
    return [
        Problem(f"weights={config.weights.folder}", f"{path}=false", f"weights are imported before {why}")
        for path, why in OFF.items()
        if config.at(path)
    ]


RULES = tuple(Rule(test, needs=lambda t: t.weights.folder is not None) for test in (_twice, _initial, _fp8, _off))
