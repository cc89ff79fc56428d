# SPDX-License-Identifier: Apache-2.0
"""All rules of a configuration, whatever machine it runs on."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from tp_invariant_recipes.check import combined_schedule, cuda_graphs, fsdp, layout, recording, relations
from tp_invariant_recipes.check import finetuning as finetuning_rules
from tp_invariant_recipes.check.invariant import invariance
from tp_invariant_recipes.check.rule import Rule, broken_rules, value_of
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.numerics.mode import STOCK
from tp_invariant_recipes.settings import delta_net, schema
from tp_invariant_recipes.settings.environment import NAME, changing_bits
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.secrets import holds, named, redacted
from tp_invariant_recipes.sources.recipe_layer import SPECS

_shown = cache(redacted)  # of names of fields, which are the same in each configuration


def _held(sections: Any, path: str) -> Iterator[Problem]:
    if isinstance(sections, dict):
        for name, value in sections.items():
            inner = f"{path}.{_shown(str(name))}".removeprefix(".")
            if path == "cluster.environment" and named(str(name)):
                continue  # check/configuration.py refuses it
            if path.endswith("_tags") and named(str(name)):
                yield _refusal(inner)
            else:
                yield from _held(value, inner)
    elif isinstance(sections, list | tuple):
        for value in sections:
            yield from _held(value, path)
    elif isinstance(sections, str) and holds(sections):
        yield _refusal(path)


def _refusal(path: str) -> Problem:
    return Problem(
        path,
        "holds what looks like a secret, and what is configured is written down",
        "set it in a variable where you start the run, and for a job name that in cluster.forward",
    )


SECRET_RULES: tuple[Rule[RunConfig], ...] = (Rule(lambda config: [*dict.fromkeys(_held(config.sections, ""))]),)


# The rules of a cluster's environment variables, and of the limit on silence. None shows the value of a secret.


def _unnamed(config: RunConfig) -> Iterator[Problem]:
    for name in config.cluster.environment:
        if not NAME.fullmatch(name):
            yield Problem("cluster.environment", f"{name!r} is no name of a variable")


def _secret(config: RunConfig) -> Iterator[Problem]:
    text = "looks like a secret, and what is configured is written down"
    solve = "set it where you start the run, and for a job name it in cluster.forward"
    for name in filter(named, config.cluster.environment):
        yield Problem(f"cluster.environment.{name}", text, solve)


VARIABLE_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(lambda t: isinstance(t.run.hang_timeout, int) and t.run.hang_timeout < 1,
        "must be at least 1 second, auto, or off", head=value_of("run.hang_timeout")),
    Rule(_unnamed),
    Rule(_secret),
    Rule(lambda t: changing_bits(t.device.kind, t.cluster.environment), needs=lambda t: t.numerics.mode != STOCK),
)  # fmt: skip


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


RECIPE_RULES = tuple(Rule[RunConfig](test, needs=lambda t: t.recipe.name is not None) for test in (_device, _objects))


# In the order of messages.
RULES: tuple[Rule[RunConfig], ...] = (
    *layout.RULES, *relations.RULES, *fsdp.RULES, *invariance.RULES, *combined_schedule.RULES, *cuda_graphs.RULES,
    *relations.PRECISION_RULES, *recording.RULES, *recording.GUARD_RULES, *VARIABLE_RULES, *SECRET_RULES, *RECIPE_RULES,
    *finetuning_rules.EXAMPLE_RULES, *finetuning_rules.ADAPTER_RULES, *finetuning_rules.WEIGHTS_RULES,
)  # fmt: skip


def check(config: RunConfig) -> list[Problem]:
    """Everything that is wrong with a configuration whose values have their types (config/compose.py)."""
    return broken_rules(config, RULES)
