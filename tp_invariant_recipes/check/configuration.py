"""All rules of a configuration, whatever machine it runs on."""

from tp_invariant_recipes.check import cuda_graphs, guard, layout, recording, relations
from tp_invariant_recipes.check import finetuning as finetuning_rules
from tp_invariant_recipes.check import secrets as secret_rules
from tp_invariant_recipes.check.invariant import invariance
from tp_invariant_recipes.check.rule import Rule, broken_rules
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings import delta_net, schema
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sources.recipe_layer import SPECS

# What invariant numerics know in the place of an object.
HOW = {
    "comm_overlap.tp_comm_overlap_cfg": "comm_overlap.tp_comm_overlap_cfg=null",
    "model.attention_backend": "model.attention_backend=auto",
    "model.cuda_graph_modules": "model.cuda_graph_modules=[attn]",
    "dataset": "a GPTDatasetConfig whose blend names indexed datasets, or a GPTSFTDatasetConfig of JSONL, whose order "
    "of examples follows from the seed alone; data=text; data=mock",
}
ASKED = {"dataset": "which sequences every layout reads"}


def _without_layers(config: RunConfig) -> bool:
    return config.device.kind == "cpu" and config.model["_target_"] not in schema.PROVIDERS


def _device(config: RunConfig) -> Problem | None:
    text = f"device=cpu has no layers for Bridge's {config.model['_target_'].rpartition('.')[2]}"
    return Problem("", text, "device=gpu") if _without_layers(config) else None


def _objects(config: RunConfig) -> list[Problem]:
    if not config.numerics.invariant or _without_layers(config):
        return []
    family = families.family_of(config.model)
    specs = [name for name in SPECS if config.model.get(name) not in (None, delta_net.SPEC) and family is None]
    return [
        Problem(
            f"numerics={config.numerics.mode}",
            f"the recipe sets {path} to an object, and no rule says {ASKED.get(path, 'how that adds')}",
            f"{HOW.get(path, 'leave it out of the recipe')}, or numerics=stock",
        )
        for path in dict.fromkeys((*config.recipe.kept, *(f"model.{name}" for name in specs)))
    ]


RECIPE_RULES = tuple(Rule(test, needs=lambda t: t.recipe.name is not None) for test in (_device, _objects))


# In the order of messages.
RULES: tuple[Rule[RunConfig], ...] = (
    *layout.RULES, *relations.RULES, *invariance.RULES, *cuda_graphs.RULES, *relations.PRECISION_RULES,
    *recording.RULES, *guard.RULES, *secret_rules.VARIABLE_RULES, *secret_rules.RULES, *RECIPE_RULES,
    *finetuning_rules.EXAMPLE_RULES, *finetuning_rules.ADAPTER_RULES, *relations.WEIGHTS_RULES,
)  # fmt: skip


def check(config: RunConfig) -> list[Problem]:
    """Everything that is wrong with a configuration whose values have their types (config/compose.py)."""
    return broken_rules(config, RULES)
