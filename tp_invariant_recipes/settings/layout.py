"""The parallel layout of a run: degrees, and what they split. check/layout.py has its rules."""

from tp_invariant_recipes.settings.run_config import RunConfig

# Numbers of the model that tensor parallelism splits.
SPLIT_BY_TP = (
    *("num_attention_heads", "num_query_groups", "ffn_hidden_size", "vocab_size", "mamba_num_groups"),
    "mamba_num_heads",
)

# How many layers the first and the last pipeline stage have, if not as many as the others.
UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")

# Whether the first stage has a layer less than the others, for the embedding, and the last one, for the loss.
ACCOUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def splits_unevenly(config: RunConfig) -> bool:
    """Whether tp does not divide the model."""
    tp = config.layout.tp
    return any((config.model.get(number) or 0) % tp for number in SPLIT_BY_TP)


def uneven_ends(config: RunConfig) -> tuple[int, int] | None:
    """Return the layers of the first and the last stage that let the stages between them have equally many.

    None: pp divides the layers, a field says how they are split, or Megatron has no such split.
    """
    model, pp = config.model, config.layout.pp
    chunks = model.get("virtual_pipeline_model_parallel_size") or 1
    layers, (first, last) = config.shape.layers, (model.get(key) for key in UNEVEN)
    stated = any(model.get(key) for key in ("pipeline_model_parallel_layout", "hybrid_layer_pattern", *ACCOUNTED))
    if stated or last or layers < pp or layers % pp == 0 or layers % chunks:
        return None
    # Counted in chunks of a layer for each of a stage's virtual stages.
    units = layers // chunks
    each = next((n for n in (-(-units // pp), units // pp) if n and units - n * (pp - 2) >= 2), 0)
    ends = units - each * (pp - 2)
    sizes = (ends - ends // 2) * chunks, ends // 2 * chunks
    return sizes if each and first in (None, sizes[0]) else None
