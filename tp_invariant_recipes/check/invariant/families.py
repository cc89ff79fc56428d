"""What the invariant numerics cover of families with layers of their own (numerics/megatron/families)."""

from tp_invariant_recipes.check.invariant.limit import Test, has, lacks, limit_of, uncaptured, uncut
from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings import low_precision
from tp_invariant_recipes.settings.run_config import RunConfig

CAPPED = (None, "auto", "local")  # backends of attention


def _has_own_layers(config: RunConfig) -> bool:
    return families.family_of(config.model) is not None


def _row(wrong: Test, text: str, solve: str = "") -> Rule[RunConfig]:
    """Of a run of such a family. text: after its name."""
    return limit_of(_has_own_layers, wrong, f"a family with layers of its own {text}", solve)


LIMITS = (
    limit_of(_has_own_layers, lacks(mode.FAMILIES), mode.only(mode.FAMILIES), "numerics=tree"),
    _row(*uncut("has")),
    _row(low_precision.enabled, "has no version in FP8", "precision=bf16"),
    _row(*uncaptured("has")),
    _row(has("is_vision_language"), "sees no images", "model.is_vision_language=false"),
    _row(
        lambda t: t.model.get("scatter_embedding_sequence_parallel") is False,
        "scatters its embeddings",
        "model.scatter_embedding_sequence_parallel=true",
    ),
    limit_of(
        has("attn_logit_softcapping"),
        lambda t: t.model.get("attention_backend") not in CAPPED,
        "soft-capped attention is computed by Megatron's own products",
        "model.attention_backend=auto",
    ),
    _row(has("mtp_num_layers"), "has no multi-token prediction", "model.mtp_num_layers=null"),
    _row(has("add_bias_linear"), "has no biases", "model.add_bias_linear=false"),
)
