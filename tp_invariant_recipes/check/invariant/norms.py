"""What the invariant numerics cover of norms over the hidden size (numerics/megatron/base.py)."""

from functools import partial

from tp_invariant_recipes.check.invariant import latent
from tp_invariant_recipes.check.invariant.limit import has, lacks, limit, limit_of
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings.run_config import RunConfig

RMS, LAYER = "RMSNorm", "LayerNorm"


def other_layers(config: RunConfig) -> bool:
    """Whether a model has layers that no plain GPT model has."""
    model = config.model
    own = config.shape.hybrid or families.family_of(model) or families.delta_sizes(model)
    return bool(own or latent.has_it(config) or config.shape.depths)


_of_layer_norms = partial(limit_of, lambda t: t.model.get("normalization") == LAYER)

LIMITS = (
    limit(
        lambda t: t.model.get("normalization") not in (RMS, LAYER),
        f"of norms only {RMS} and {LAYER} are covered",
        f"model.normalization={RMS}",
    ),
    _of_layer_norms(lacks(mode.LAYER_NORM), mode.only(mode.LAYER_NORM), f"model.normalization={RMS}"),
    _of_layer_norms(
        other_layers,
        f"{LAYER} is covered for GPT models without multi-token prediction or layers of their own",
        f"model.normalization={RMS}",
    ),
    _of_layer_norms(
        has("qk_layernorm"),
        f"of norms of queries and keys only {RMS} is covered",
        "model.qk_layernorm=false",
    ),
    limit_of(
        has("layernorm_zero_centered_gamma"),
        lacks(mode.CENTRED),
        mode.only(mode.CENTRED),
        "model.layernorm_zero_centered_gamma=false",
    ),
)
