"""What the invariant numerics cover of multi-token prediction (numerics/megatron/multi_token.py)."""

from functools import partial

from tp_invariant_recipes.check.invariant.limit import has, lacks, limit_of, uncaptured, uncut
from tp_invariant_recipes.fields.model import MULTI_TOKEN_OFF, MULTI_TOKEN_PATTERN
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.megatron import hybrid_layers
from tp_invariant_recipes.settings.run_config import RunConfig

FIELD = "mtp_num_layers"
REPEATED = "mtp_use_repeated_layer"
PATTERN = MULTI_TOKEN_PATTERN
WITHOUT = f"model.{FIELD}=null"


def _hybrid(config: RunConfig) -> bool:
    return config.shape.hybrid


def _before_the_last(stages: str | list[list[str]] | None) -> bool:
    """Whether a layout of stages has layers of multi-token prediction before the last stage. "Et|(tt|)*30mL": no."""
    if isinstance(stages, str):
        return "m" in stages.rpartition("|")[0]
    return any("mtp" in stage for stage in (stages or ())[:-1])


_row = partial(limit_of, has(FIELD))

LIMITS = (
    _row(lacks(mode.MTP), mode.only(mode.MTP), WITHOUT),
    _row(
        lambda t: _hybrid(t) and not t.model.get(PATTERN),
        "multi-token prediction of a hybrid model has no layers",
        f"model.{PATTERN}='*E', or {WITHOUT}",
    ),
    _row(
        lambda t: _hybrid(t) and set(t.model.get(PATTERN) or "") - {*hybrid_layers.LAYERS},
        f"of hybrid layers only {' '.join(hybrid_layers.LAYERS)} have invariant versions",
        f"model.{PATTERN}",
    ),
    _row(
        lambda t: not _hybrid(t) and t.model.get(REPEATED),
        "one layer for all depths is covered for hybrid models alone",
        f"model.{REPEATED}=false",
    ),
    # Bridge adds these layers to the pattern, whatever mtp_num_layers is.
    limit_of(
        has(PATTERN),
        lambda t: not t.model.get(FIELD),
        f"model.{PATTERN} adds layers of multi-token prediction",
        f"model.{PATTERN}=null, {WITHOUT}",
    ),
    _row(*uncut("multi-token prediction has")),
    _row(*uncaptured("multi-token prediction has", f", or {WITHOUT}")),
    _row(
        lambda t: _before_the_last(t.model.get("pipeline_model_parallel_layout")),
        "the layers of multi-token prediction are on the last stage, beside the loss",
        "model.pipeline_model_parallel_layout=null",
    ),
    _row(
        lambda t: _hybrid(t) and t.model.get("recompute_granularity") == "full",
        "multi-token prediction of a hybrid model was not shown to have the same bits where "
        "whole layers are recomputed",
        "model.recompute_granularity=selective",
    ),
    _row(
        lambda t: (
            t.model.get("recompute_granularity") == "full"
            and (t.model.get("recompute_method"), t.model.get("recompute_num_layers")) != ("uniform", 1)
        ),
        "Megatron-Core recomputes the layers of multi-token prediction one by one",
        "model.recompute_method=uniform, model.recompute_num_layers=1",
    ),
    *(_row(has(field), f"model.{field} is not covered", "leave it unset") for field in MULTI_TOKEN_OFF),
)
