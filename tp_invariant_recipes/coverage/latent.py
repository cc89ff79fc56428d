"""The limits of invariant multi-latent attention (numerics/megatron/latent_attention.py), for models that have it."""

from collections.abc import Callable

from tp_invariant_recipes.coverage.limit import Limit, cuts_sequences, is_set, lacks
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.settings import schema
from tp_invariant_recipes.settings.run_config import RunConfig

FIELD = "multi_latent_attention"

# Fields that replace the invariant layer's parts by others.
OFF = ("cache_mla_latents", "mla_down_proj_fusion")


def has_it(config: RunConfig) -> bool:
    """Whether the model has multi-latent attention; only its provider makes models with it."""
    return bool(config.model.get(FIELD)) or config.model.get("_target_") == schema.LATENT


def _row(wrong: Callable[[RunConfig], bool], why: str) -> Limit:
    return Limit(lambda t: has_it(t) and wrong(t), why)


LIMITS = (
    _row(
        lambda t: t.model.get("_target_") != schema.LATENT or not t.model.get(FIELD),
        f"multi-latent attention is covered for {schema.LATENT.rpartition('.')[2]} with model.{FIELD}=true alone",
    ),
    _row(
        lacks(mode.LATENT),
        mode.only(mode.LATENT),
    ),
    _row(
        lambda t: t.model["tensor_model_parallel_size"] > 1 and not t.model["sequence_parallel"],
        "multi-latent attention under tensor parallelism needs sequence parallelism; sp=true",
    ),
    _row(
        cuts_sequences,
        "multi-latent attention has no version with context shards; cp=1, and leave numerics.context_shards out",
    ),
    _row(
        lambda t: t.model.get("num_query_groups") not in (None, t.model["num_attention_heads"]),
        "multi-latent attention has keys and values for every head; leave model.num_query_groups unset",
    ),
    _row(
        lambda t: not t.model.get("qk_layernorm"),
        "multi-latent attention is covered with its norms of latents; model.qk_layernorm=true",
    ),
    _row(
        lambda t: bool(t.model.get("add_bias_linear") or t.model.get("add_qkv_bias")),
        "multi-latent attention with biases is not covered; model.add_bias_linear=false, model.add_qkv_bias=false",
    ),
    _row(
        lambda t: bool(t.model.get("apply_rope_fusion")),
        "the fused rotation of multi-latent attention adds up the shared key's gradient in an order of its own; "
        "model.apply_rope_fusion=false",
    ),
    _row(
        is_set("recompute_granularity"),
        "recomputation of multi-latent attention was not shown to have the same bits; model.recompute_granularity=null",
    ),
    *(_row(is_set(field), f"model.{field} is not covered; leave it unset") for field in OFF),
)
