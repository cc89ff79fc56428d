"""What the invariant numerics cover of multi-token prediction (numerics/megatron/multi_token.py)."""

from collections.abc import Callable
from typing import Any

from tp_invariant_recipes.coverage.limit import Limit, cuts_sequences, is_set, lacks
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.settings import cuda_graphs, peft
from tp_invariant_recipes.settings.run_config import RunConfig

FIELD = "mtp_num_layers"
OFF = ("mtp_use_repeated_layer", "mtp_detach_heads")
PATTERN = "mtp_hybrid_override_pattern"
WITHOUT = f"model.{FIELD}=null"


def _row(wrong: Callable[[RunConfig], Any], why: str) -> Limit:
    return Limit(lambda t: bool(t.model.get(FIELD)) and bool(wrong(t)), why)


def _before_the_last(stages: str | list[list[str]] | None) -> bool:
    """Whether a layout of stages has layers of multi-token prediction before the last stage. "Et|(tt|)*30mL": no."""
    if isinstance(stages, str):
        return "m" in stages.rpartition("|")[0]
    return any("mtp" in stage for stage in (stages or ())[:-1])


LIMITS = (
    _row(lacks(mode.MTP), f"{mode.only(mode.MTP)}; {WITHOUT}"),
    _row(
        lambda t: "hybrid_layer_pattern" in t.model,
        f"multi-token prediction of hybrid models has no invariant version; {WITHOUT}",
    ),
    # Bridge adds these layers to the pattern, whatever mtp_num_layers is.
    Limit(
        is_set(PATTERN),
        f"model.{PATTERN} adds layers of multi-token prediction; model.{PATTERN}=null, {WITHOUT}",
    ),
    _row(
        cuts_sequences,
        "multi-token prediction has no version with context shards; cp=1, and leave numerics.context_shards out",
    ),
    _row(
        lambda t: cuda_graphs.requested(t.model),
        f"multi-token prediction has not been captured in CUDA graphs; cuda_graph=off, or {WITHOUT}",
    ),
    _row(
        lambda t: t.model.get("share_embeddings_and_output_weights") and t.model["pipeline_model_parallel_size"] > 1,
        "Megatron-Core cannot save a tied embedding beside multi-token prediction; pp=1, or "
        "model.share_embeddings_and_output_weights=false",
    ),
    _row(
        lambda t: _before_the_last(t.model.get("pipeline_model_parallel_layout")),
        "the layers of multi-token prediction are on the last stage, beside the loss; "
        "model.pipeline_model_parallel_layout=null",
    ),
    _row(
        lambda t: t.model.get("recompute_granularity") == "full",
        "multi-token prediction was not shown to have the same bits where whole layers are recomputed; "
        "model.recompute_granularity=selective",
    ),
    _row(peft.section, f"adapters of multi-token prediction have no invariant version; {WITHOUT}"),
    *(_row(is_set(field), f"model.{field} is not covered; leave it unset") for field in OFF),
)
