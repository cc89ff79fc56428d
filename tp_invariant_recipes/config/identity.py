"""What makes two runs comparable: the model, the data, the optimizer and the seed, whatever the layout or machine."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from tp_invariant_recipes.fields import catalogue
from tp_invariant_recipes.ledger.schema import SHARDS
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings import finetuning
from tp_invariant_recipes.settings.run_config import RunConfig

WEIGHTS_DIGEST = "weights.digest"

# Sections whose fields are part of the identity.
SECTIONS = ("model", "train", "optimizer", "scheduler", "ddp", "dataset", "tokenizer", "rng", "mixed_precision")

# The same of runs that have them.
OPTIONAL = (finetuning.SECTION,)

# Fields of those sections that are not, and why; beside them fields that change no bits (fields/field.py).
EXCLUDED = {
    "how the model is cut": "model.*_parallel_size model.sequence_parallel model.pipeline_model_parallel_layout "
    "model.num_layers_in_*_pipeline_stage model.account_for_*_in_pipeline_split model.cp_comm_type "
    "model.pipeline_dtype train.micro_batch_size",
    "which code computes it": "model._target_ model.transformer_impl model.transformer_layer_spec "
    "model.hybrid_stack_spec model.attention_backend model.*fusion* model.use_fused_* model.*grouped_gemm* "
    "model.*token_dispatcher* model.*persist_layer_norm model.cuda_graph_* model.use_te_rng_tracker "
    "rng.te_rng_tracker model.deterministic_mode model.batch_invariant_mode "
    "model.disable_bf16_reduced_precision_matmul",
    "torch adds up a softmax in fp32, and Transformer Engine never reads it": "model.attention_softmax_in_fp32",
    "when it is computed": "model.recompute_* model.*overlap* model.batch_p2p_comm "
    "model.microbatch_group_size_per_vp_stage model.*offload* optimizer.*overlap* ddp.*overlap*",
    "how state is spread over ranks": "optimizer.use_distributed_optimizer "
    "optimizer.use_layer_wise_distributed_optimizer ddp.use_distributed_optimizer ddp.average_in_collective "
    "ddp.data_parallel_sharding_strategy ddp.bucket_size",
    "where a resumed run takes its schedule from": "scheduler.*_opt_param_scheduler",
    "where a recipe takes the model's sizes from": "model.hf_model_id model.hf_model_revision",
    "how long it runs": "train.train_iters",
    "whether the data brings a mask that nobody reads, since attention is causal": "dataset.create_attention_mask",
    "where the data lies; its digest says what it is": "dataset.blend* dataset.dataset_root",
}
PATTERNS = tuple(pattern for patterns in EXCLUDED.values() for pattern in patterns.split())


def identity(config: RunConfig, data_digest: str | None, weights_digest: str | None = None) -> dict[str, Any]:
    """Dotted key -> value of everything that two comparable runs have in common.

    data_digest:    `PreparedData.digest` of text or `Examples.digest` of examples; None for generated data.
    weights_digest: of the checkpoint that the weights come from (`weights.Checkpoint.digest`); None: they are new.
    """
    flat = of_sections(config.sections)
    if finetuning.is_sft(config.section("dataset")):
        flat = {key: value for key, value in flat.items() if key not in finetuning.PLACES}
    if flat.get("scheduler.lr_decay_iters") is None:
        flat["scheduler.lr_decay_iters"] = config.train["train_iters"]
    flat["data.kind"] = config.data.kind
    if family := families.family_of(config.model):
        flat["model.layers"] = family
    for key in SHARDS if config.numerics.invariant else ():
        if (count := getattr(config.numerics, key.partition(".")[2])) is not None:
            flat[key] = count
    flat["data.digest"] = data_digest
    if weights_digest is not None:
        flat[WEIGHTS_DIGEST] = weights_digest
    return dict(sorted(flat.items()))


def of_sections(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the identity that sections of Bridge make."""
    fields = {name: sections.get(name) for name in SECTIONS}
    fields |= {name: sections[name] for name in OPTIONAL if sections.get(name) is not None}
    return {key: value for key, value in flat(fields).items() if value != {} and not _excluded(key)}


def _excluded(key: str) -> bool:
    listed = any(fnmatchcase(key, pattern) for pattern in PATTERNS)
    return listed or not catalogue.changes_bits(key)


def flat(sections: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of everything that is no mapping, or an empty one."""
    fields: dict[str, Any] = {}
    for name, value in sections.items():
        inner = isinstance(value, Mapping) and value
        fields |= flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return fields
