"""What the invariant numerics cover of families with layers of their own (numerics/megatron/families)."""

from collections.abc import Callable
from typing import Any

from tp_invariant_recipes.coverage.limit import Limit, cuts_sequences, is_set, lacks
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings import cuda_graphs, low_precision
from tp_invariant_recipes.settings.run_config import RunConfig

CAPPED = (None, "auto", "local")  # backends of attention


def _row(wrong: Callable[[RunConfig], Any], why: str) -> Limit:
    """Of a run of such a family. why: after its name."""
    return Limit(
        lambda t: families.of(t.model) is not None and bool(wrong(t)), f"a family with layers of its own {why}"
    )


LIMITS = (
    Limit(
        lambda t: families.of(t.model) is not None and lacks(mode.FAMILIES)(t),
        f"{mode.only(mode.FAMILIES)}; numerics=tree",
    ),
    _row(cuts_sequences, "has no version with context shards; cp=1, and leave numerics.context_shards out"),
    _row(low_precision.enabled, "has no version in FP8; precision=bf16"),
    _row(
        lambda t: cuda_graphs.requested(t.model),
        "has not been captured in CUDA graphs; cuda_graph=off",
    ),
    _row(is_set("is_vision_language"), "sees no images; model.is_vision_language=false"),
    _row(
        lambda t: t.model.get("scatter_embedding_sequence_parallel") is False,
        "scatters its embeddings; model.scatter_embedding_sequence_parallel=true",
    ),
    Limit(
        lambda t: bool(t.model.get("attn_logit_softcapping")) and t.model.get("attention_backend") not in CAPPED,
        "soft-capped attention is computed by Megatron's own products; model.attention_backend=auto",
    ),
    _row(is_set("mtp_num_layers"), "has no multi-token prediction; model.mtp_num_layers=null"),
    _row(is_set("add_bias_linear"), "has no biases; model.add_bias_linear=false"),
)
