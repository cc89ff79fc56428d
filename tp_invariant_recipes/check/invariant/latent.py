"""The limits of invariant multi-latent attention (megatron/attention/latent_attention.py), for models that have it."""

from functools import partial

from tp_invariant_recipes.check.invariant.limit import has, lacks, limit_of, uncut, unsplit
from tp_invariant_recipes.fields.model import LATENT_OFF
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.settings import schema
from tp_invariant_recipes.settings.run_config import RunConfig

FIELD = "multi_latent_attention"


def has_it(config: RunConfig) -> bool:
    """Whether the model has multi-latent attention; only its provider makes models with it."""
    return bool(config.model.get(FIELD)) or config.model.get("_target_") == schema.LATENT


_row = partial(limit_of, has_it)

LIMITS = (
    _row(
        lambda t: t.model.get("_target_") != schema.LATENT or not t.model.get(FIELD),
        f"multi-latent attention is covered for {schema.LATENT.rpartition('.')[2]} with model.{FIELD}=true alone",
    ),
    _row(lacks(mode.LATENT), mode.only(mode.LATENT)),
    _row(*unsplit("multi-latent attention under tensor parallelism needs")),
    _row(*uncut("multi-latent attention has")),
    _row(
        lambda t: t.shape.groups != t.shape.heads,
        "multi-latent attention has keys and values for every head",
        "leave model.num_query_groups unset",
    ),
    _row(
        lambda t: not t.shape.head_norms,
        "multi-latent attention is covered with its norms of latents",
        "model.qk_layernorm=true",
    ),
    _row(
        lambda t: t.shape.biased or t.model.get("add_qkv_bias"),
        "multi-latent attention with biases is not covered",
        "model.add_bias_linear=false, model.add_qkv_bias=false",
    ),
    _row(
        has("apply_rope_fusion"),
        "the fused rotation of multi-latent attention adds up the shared key's gradient in an order of its own",
        "model.apply_rope_fusion=false",
    ),
    _row(
        has("recompute_granularity"),
        "recomputation of multi-latent attention was not shown to have the same bits",
        "model.recompute_granularity=null",
    ),
    *(_row(has(field), f"model.{field} is not covered", "leave it unset") for field in LATENT_OFF),
)
