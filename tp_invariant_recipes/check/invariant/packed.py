"""What the invariant numerics cover of packed sequences (numerics/megatron/attention/packed.py)."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from tp_invariant_recipes.check.invariant import fp8
from tp_invariant_recipes.check.invariant.limit import lacks, limit
from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.cpu_host.vectors import VECTORS
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.fields.field import as_text
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.settings import cuda_graphs, sft
from tp_invariant_recipes.settings.run_config import RunConfig

PADDED = "dataset.offline_packing_specs.pad_seq_to_mult"
WITHOUT = "dataset.enable_offline_packing=false"


def _row(wrong: Callable[[RunConfig, Mapping[str, Any]], Any], text: str, solve: str = "") -> Rule[RunConfig]:
    """wrong: of a run with packed sequences, and of how they are packed."""
    return limit(lambda t: (specs := sft.packing(t)) is not None and wrong(t, specs), text, solve)


def divisors(config: RunConfig) -> tuple[int, ...]:
    """Return what divides the length of each packed sequence: V where it is known, and the tokens of a sum in FP8."""
    shards = config.numerics.virtual_shards
    known = (shards,) if isinstance(shards, int) and shards > 0 else ()
    return (*known, *((each,) if (each := fp8.tokens(config)) > 1 else ()))


def uneven(config: RunConfig, specs: Mapping[str, Any]) -> bool:
    """Whether one of `divisors` does not divide each packed sequence, or one is padded by less than two tokens."""
    multiple = specs.get("pad_seq_to_mult") or 1
    return multiple < 2 or any(multiple % divisor for divisor in divisors(config))


def fitting(config: RunConfig, multiple: int) -> int:
    """Return the next multiple of what packed sequences are padded to that fits; 8 where nothing says what does."""
    return max(2, math.lcm(multiple, *(divisors(config) or (8,))))


def _uneven_padding(config: RunConfig) -> Problem | None:
    specs = sft.packing(config)
    if specs is None or not uneven(config, specs):
        return None
    multiple = specs.get("pad_seq_to_mult")
    text = "virtual shards, and blocks in low precision, divide each packed sequence, and its padding is told apart"
    return Problem(f"{PADDED}={as_text(multiple)}", text, f"{PADDED}={fitting(config, multiple or 1)}")


def _routed(config: RunConfig, specs: Mapping[str, Any]) -> int:
    """Return the number of router logits for a virtual shard of the shortest sequence; 0 without experts."""
    each = specs["pad_seq_to_mult"] // (config.numerics.virtual_shards or 1)
    return each * config.shape.experts


LIMITS = (
    _row(lambda t, _: lacks(mode.PACKED)(t), mode.only(mode.PACKED), WITHOUT),
    limit(_uneven_padding),
    _row(
        lambda t, specs: specs.get("pad_cu_seqlens") or cuda_graphs.requested(t.model),
        "the number of sequences differs from row to row, and a captured step has one",
        "cuda_graph=off, dataset.offline_packing_specs.pad_cu_seqlens=false",
    ),
    _row(
        lambda t, specs: t.device.kind == "cpu" and not uneven(t, specs) and _routed(t, specs) % VECTORS,
        f"on a CPU dataset.offline_packing_specs.pad_seq_to_mult / numerics.virtual_shards * model.num_moe_experts "
        f"must be a multiple of {VECTORS}",
    ),
    _row(
        lambda t, _: t.shape.depths and not t.model.get("calculate_per_token_loss"),
        "multi-token prediction of packed sequences is covered where each token counts alike",
        "model.calculate_per_token_loss=true",
    ),
    _row(
        lambda t, _: t.ledger.trace is not None,
        "a trace has one place for the module of a row, which runs once for each sequence",
        "leave ledger.trace out",
    ),
)
