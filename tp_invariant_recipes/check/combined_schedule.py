# SPDX-License-Identifier: Apache-2.0
"""The limits of Megatron's combined schedule, which overlaps the all-to-alls of experts with the next micro-batch.

It takes layers apart, and calls their parts. Megatron and Bridge assert some of these limits, one at a time.
"""

from functools import partial

from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings import finetuning
from tp_invariant_recipes.settings.run_config import COMBINED as FIELD
from tp_invariant_recipes.settings.run_config import OVERLAPS as SECTION
from tp_invariant_recipes.settings.run_config import RunConfig

DELAYED = "delay_wgrad_compute"


def _key(config: RunConfig) -> str:
    return f"{SECTION if config.section(SECTION) else 'model'}.{FIELD}=true"


_row = partial(Rule, needs=RunConfig.overlaps, head=_key)
_invariant = partial(Rule, needs=lambda t: t.overlaps() and t.numerics.invariant, head=_key, stock=True)


def _replaced(field: str) -> Rule[RunConfig]:
    """Return the rule that a field of the model is not replaced by its twin in the other section."""
    return Rule(
        lambda t: t.model.get(field) and not t.overlaps(field),
        f"Bridge takes {SECTION}.{field} instead",
        f"{SECTION}.{field}=true",
        head=lambda t: f"model.{field}=true",
    )


def _hybrid(config: RunConfig) -> Problem | None:
    return Problem("", "hybrid models cannot be taken apart", config.without_overlap) if config.shape.hybrid else None


def _recomputed(config: RunConfig) -> bool:
    granularity, method, layers, modules = (
        config.model.get(f"recompute_{name}") for name in ("granularity", "method", "num_layers", "modules")
    )
    return bool(granularity == "full" or method or layers or "moe" in (modules or ()))


RULES: tuple[Rule[RunConfig], ...] = (
    Rule(lambda t: "tp_comm_overlap" not in t.section(SECTION), "it has no default",
        f"{SECTION}.tp_comm_overlap=false or true", needs=lambda t: t.section(SECTION),
        head=lambda t: f"{SECTION}.tp_comm_overlap"),
    _replaced(FIELD),
    _replaced(DELAYED),
    _row(lambda t: t.layout.ep == 1, "no rank sends tokens to another rank's experts", "ep=2"),
    _row(lambda t: t.model.get("moe_token_dispatcher_type") not in ("alltoall", "flex"),
        "only these dispatchers can be taken apart", "model.moe_token_dispatcher_type=alltoall or flex"),
    _row(lambda t: not (t.model.get("bf16") or t.model.get("fp16") or t.mixed_precision is not None),
        "Megatron has it in half precision alone", "precision=bf16"),
    _row(lambda t: t.layout.pp > 1 and not t.model.get("virtual_pipeline_model_parallel_size"),
        "stages must be interleaved", "pp=1, or model.virtual_pipeline_model_parallel_size"),
    _row(_recomputed, "neither whole layers nor experts can be computed again", "model.recompute_granularity=null "
        "model.recompute_method=null model.recompute_num_layers=null, and no moe in model.recompute_modules"),
    _row(lambda t: t.model.get("moe_shared_expert_overlap"), "shared experts are computed before the dispatch",
        "model.moe_shared_expert_overlap=false"),
    _row(lambda t: (t.model.get("mtp_num_layers") or 0) > 1, "MTP has one depth at most", "model.mtp_num_layers=1"),
    _row(lambda t: finetuning.packing(t) is not None,
        "Bridge does not tell it where packed sequences end, and attention would cross the ends",
        "dataset.enable_offline_packing=false"),
    _row(_hybrid),
    _row(lambda t: t.guard.kind != "off", "it frees activations that a guard reads", "guard=off"),
    _row(lambda t: bool(t.ledger.trace), "a trace reads whole layers", "leave ledger.trace out"),
    _invariant(lambda t: t.fsdp, "FSDP is not covered", "ddp.use_megatron_fsdp=false"),
    _invariant(finetuning.adapts, "adapters are not covered", "peft=none"),
    _invariant(lambda t: t.layout.tp > 1 and t.device.kind == "gpu" and t.device.peer_memory != "never",
        "tensor-parallel ranks use their symmetric memory on one stream", "device.peer_memory=never, or tp=1"),
)  # fmt: skip
