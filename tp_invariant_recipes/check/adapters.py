"""The rules of LoRA, whatever the numerics (docs/finetuning.md)."""

from collections.abc import Callable, Mapping
from typing import Any

from tp_invariant_recipes.check.invariant import lora
from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings import peft
from tp_invariant_recipes.settings.nearest import nearest
from tp_invariant_recipes.settings.run_config import RunConfig


def _unknown(config: RunConfig, fields: Mapping[str, Any]) -> Problem | None:
    wrong = [
        name
        for name in peft.targets(fields)
        if not {"*", "."} & set(name) and name not in (*peft.TARGETS, *peft.OTHERS)
    ]
    if not wrong:
        return None
    return Problem(
        "peft.target_modules", f"no layer is named {wrong[0]}{nearest(wrong[0], (*peft.TARGETS, *peft.OTHERS))}"
    )


def _divided(config: RunConfig, fields: Mapping[str, Any]) -> Problem | None:
    tp, rank = config.layout.tp, peft.dim(fields)
    shared = any(name.endswith((*peft.COLUMN_PARALLEL, *peft.WHOLE)) for name in peft.targets(fields))
    if rank % tp == 0 or not (shared or lora.of_experts(config, fields)):
        return None
    return Problem(
        "", f"tp={tp} does not divide peft.dim={rank}, whose rows the ranks share", f"peft.dim={-(-rank // tp) * tp}"
    )


def _latents(config: RunConfig, fields: Mapping[str, Any]) -> Problem | None:
    shape, tp = config.shape, config.layout.tp
    widths = {
        "linear_q_down_proj": shape.query_latent,
        "linear_kv_down_proj": shape.key_latent + shape.turned_key,
    }
    wrong = [name for name in peft.WHOLE if name in peft.targets(fields) and widths[name] % tp]
    if not wrong:
        return None
    return Problem(
        "",
        f"tp={tp} does not divide the {widths[wrong[0]]} rows of an adapter of {wrong[0]}",
        "leave it out of peft.target_modules",
    )


def _base(config: RunConfig, fields: Mapping[str, Any]) -> Problem | None:
    if config.weights.folder or config.section("checkpoint").get("pretrained_checkpoint"):
        return None
    return Problem(
        "",
        "LoRA adapts weights that are there: weights=FOLDER of Hugging Face, or "
        "checkpoint.pretrained_checkpoint=RUN/checkpoints",
    )


def _methods(config: RunConfig, fields: Mapping[str, Any]) -> Problem | None:
    wrong = {name: fields[name] for name in peft.METHOD_FIELDS if fields.get(name, peft.METHODS[0]) not in peft.METHODS}
    return next(
        (Problem(f"peft.{n}={v}", f"adapters begin with {', '.join(peft.METHODS)} only") for n, v in wrong.items()),
        None,
    )


def _initial_adapters(config: RunConfig, fields: Mapping[str, Any]) -> Problem | None:
    if config.numerics.invariant or config.numerics.initial_weights != "invariant":
        return None
    if not lora.of_experts(config, fields) and {*peft.targets(fields)} <= {*peft.TARGETS}:
        return None
    return Problem(
        "",
        f"numerics.initial_weights=invariant draws adapters of {', '.join(peft.TARGETS)} and of no experts",
        "numerics.initial_weights=megatron",
    )


def _shared_by_experts(config: RunConfig, fields: Mapping[str, Any]) -> Problem | None:
    """Only grouped experts can share an adapter."""
    grouped = config.numerics.invariant or config.model.get("moe_grouped_gemm")
    if grouped or not fields.get("share_expert_adapters") or not lora.of_experts(config, fields):
        return None
    key = "peft.share_expert_adapters"
    return Problem(f"{key}=true", "experts that are not grouped have an adapter each", f"{key}=false, or numerics=tree")


def _rule(test: Callable[[RunConfig, Mapping[str, Any]], Problem | None]) -> Rule[RunConfig]:
    """Return a rule of a run with adapters, and of its section."""
    return Rule(lambda t: test(t, peft.section(t) or {}), needs=peft.adapts)


RULES = tuple(map(_rule, (_unknown, _divided, _latents, _base, _methods, _initial_adapters, _shared_by_experts)))
