"""The rules of LoRA, whatever the numerics (docs/finetuning.md)."""

from collections.abc import Callable, Mapping
from typing import Any

from tp_invariant_recipes.check.invariant import lora
from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings import peft
from tp_invariant_recipes.settings.nearest import nearest
from tp_invariant_recipes.settings.run_config import RunConfig

Fields = Mapping[str, Any]  # of a section `peft`

_SHARED = "peft.share_expert_adapters"


def _unknown(config: RunConfig, fields: Fields) -> Problem | None:
    known = (*peft.TARGETS, *peft.OTHERS)
    wrong = next((name for name in peft.targets(fields) if not {"*", "."} & {*name} and name not in known), None)
    return Problem("peft.target_modules", f"no layer is named {wrong}{nearest(wrong, known)}") if wrong else None


def _divided(config: RunConfig, fields: Fields) -> Problem | None:
    tp, rank = config.layout.tp, peft.dim(fields)
    shared = any(name.endswith((*peft.COLUMN_PARALLEL, *peft.WHOLE)) for name in peft.targets(fields))
    if rank % tp == 0 or not (shared or lora.of_experts(config, fields)):
        return None
    text = f"tp={tp} does not divide peft.dim={rank}, whose rows the ranks share"
    return Problem("", text, f"peft.dim={-(-rank // tp) * tp}")


def _latents(config: RunConfig, fields: Fields) -> Problem | None:
    shape, tp = config.shape, config.layout.tp
    widths = {"linear_q_down_proj": shape.query_latent, "linear_kv_down_proj": shape.key_latent + shape.turned_key}
    wrong = next((name for name in peft.WHOLE if name in peft.targets(fields) and widths[name] % tp), None)
    if wrong is None:
        return None
    text = f"tp={tp} does not divide the {widths[wrong]} rows of an adapter of {wrong}"
    return Problem("", text, "leave it out of peft.target_modules")


def _methods(config: RunConfig, fields: Fields) -> Problem | None:
    wrong = {name: fields[name] for name in peft.METHOD_FIELDS if fields.get(name, peft.METHODS[0]) not in peft.METHODS}
    only = f"adapters begin with {', '.join(peft.METHODS)} only"
    return next((Problem(f"peft.{name}={value}", only) for name, value in wrong.items()), None)


def _draws_others(config: RunConfig, fields: Fields) -> bool:
    """Whether invariant weights are wanted of adapters that have none under stock numerics."""
    if config.numerics.invariant or config.numerics.initial_weights != "invariant":
        return False
    return lora.of_experts(config, fields) or not {*peft.targets(fields)} <= {*peft.TARGETS}


def _shares_adapter(config: RunConfig, fields: Fields) -> bool:
    """Whether experts that are not grouped would share an adapter."""
    grouped = config.numerics.invariant or config.model.get("moe_grouped_gemm")
    return not grouped and bool(fields.get("share_expert_adapters")) and lora.of_experts(config, fields)


def _rule(test: Callable[[RunConfig, Fields], Any], text: str = "", solve: str = "", key: str = "") -> Rule[RunConfig]:
    """Return a rule of a run with adapters, and of its section."""
    head = (lambda t: key) if key else None
    return Rule(lambda t: test(t, peft.section(t) or {}), text, solve, needs=peft.adapts, head=head)


RULES = (
    _rule(_unknown),
    _rule(_divided),
    _rule(_latents),
    _rule(
        lambda t, _: not (t.weights.folder or t.at("checkpoint.pretrained_checkpoint")),
        "LoRA adapts weights that are there: weights=FOLDER of Hugging Face, or "
        "checkpoint.pretrained_checkpoint=RUN/checkpoints",
    ),
    _rule(_methods),
    _rule(
        _draws_others,
        f"numerics.initial_weights=invariant draws adapters of {', '.join(peft.TARGETS)} and of no experts",
        "numerics.initial_weights=megatron",
    ),
    _rule(
        _shares_adapter,
        "experts that are not grouped have an adapter each",
        f"{_SHARED}=false, or numerics=tree",
        f"{_SHARED}=true",
    ),
)
