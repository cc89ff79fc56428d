"""The limits of the invariant numerics: one row per rule, so that tpi refuses an unsupported run before it starts."""

import math
from functools import partial
from typing import Any

from tp_invariant_recipes.coverage import (
    allowed_fields,
    delta_net,
    experts,
    families,
    finetuning,
    fp8,
    graphs,
    latent,
    lora,
    model_fields,
    multi_token,
    muon,
    norms,
    packed,
    portable,
)
from tp_invariant_recipes.coverage.limit import Limit, cuts_sequences, has, lacks, of, uncut
from tp_invariant_recipes.errors import OR_STOCK
from tp_invariant_recipes.host.vectors import VECTORS
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.megatron import hybrid_spec
from tp_invariant_recipes.settings import layout, low_precision, schema, sft
from tp_invariant_recipes.settings.run_config import RunConfig

# Numbers of the model that are split into V shards.
SHARDED = (
    *("num_attention_heads", "num_query_groups", "ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("mamba_num_heads", "mamba_num_groups", "vocab_size", "seq_length"),
)

HYBRID_SIGNS = {*hybrid_spec.LAYERS, hybrid_spec.SEPARATOR}
*_OTHERS, _LAST = hybrid_spec.LAYERS

*_FIRST, _LATEST = (path.rpartition(".")[2] for path in schema.PROVIDERS)

# Those of SHARDED that an activation follows.
ACTIVATED = ("ffn_hidden_size", "moe_shared_expert_intermediate_size")

DEFAULT_SHARDS = 8

# model.position_embedding_type: a vector for each position.
LEARNED = "learned_absolute"

# Fields of the model that replace the invariant layers or sums by others.
OFF = (
    *("qk_l2_norm", "use_transformer_engine_op_fuser", "use_transformer_engine_full_layer_spec"),
    *("dense_grouped_gemm", "use_kitchen", "heterogeneous_block_specs", "fused_residual_rmsnorm"),
    *("fp32_residual_connection", "symmetric_ar_type", "defer_embedding_wgrad_compute"),
    *("inference_fuse_tp_communication", "cpu_offloading", "fine_grained_activation_offloading"),
    *("fused_single_qkv_rope", "fp16", "qk_clip", "log_max_attention_logit"),
)

# By source, flash-attn's backward groups sums by the number of heads on a rank.
ATTENTION_BACKENDS = ("auto", "fused", "unfused", "local")

_sinks = partial(of, lambda t: t.model.get("softmax_type", "vanilla") != "vanilla")

LIMITS = (
    Limit(
        lambda t: t.numerics.initial_weights != "invariant",
        "Megatron draws other weights for every tp; numerics.initial_weights=invariant",
    ),
    of(
        lacks(mode.FP64_NORM),
        lambda t: t.numerics.grad_norm != "exact",
        "an fp64 sum still depends on its order; numerics.grad_norm=exact",
    ),
    Limit(
        lambda t: t.model.get("_target_") not in (None, *schema.PROVIDERS),
        f"of Bridge's models only {', '.join(_FIRST)} and {_LATEST} have invariant layers",
    ),
    *delta_net.LIMITS,
    *experts.LIMITS,
    *families.LIMITS,
    *graphs.LIMITS,
    *latent.LIMITS,
    *multi_token.LIMITS,
    *muon.LIMITS,
    *packed.LIMITS,
    *portable.LIMITS,
    *finetuning.LIMITS,
    *fp8.LIMITS,
    *lora.LIMITS,
    of(lambda t: "hybrid_layer_pattern" in t.model, lacks(mode.HYBRID), mode.only(mode.HYBRID)),
    Limit(
        lambda t: set(t.model.get("hybrid_layer_pattern") or "") - HYBRID_SIGNS,
        f"of hybrid layers only {', '.join(_OTHERS)} and {_LAST} have invariant versions; model.hybrid_layer_pattern",
    ),
    Limit(
        lambda t: t.model.get("use_mamba_mem_eff_path") is False,
        "Megatron's other path through a Mamba layer is not covered; model.use_mamba_mem_eff_path=true",
    ),
    *norms.LIMITS,
    Limit(
        lambda t: (
            t.model.get("add_bias_linear")
            and t.model.get("bias_activation_fusion")
            and not t.model.get("gated_linear_unit")
        ),
        "a bias fused into an ungated activation has no invariant version; model.bias_activation_fusion=false",
    ),
    Limit(
        lambda t: t.model.get("hidden_dropout") or t.model.get("attention_dropout"),
        "dropout draws other numbers in every layout; model.hidden_dropout=0, model.attention_dropout=0",
    ),
    of(
        cuts_sequences,
        lacks(mode.CONTEXT_SHARDS),
        f"{mode.only(mode.CONTEXT_SHARDS)}; cp=1, and leave numerics.context_shards out",
    ),
    of(
        lambda t: "hybrid_layer_pattern" in t.model,
        *uncut("Mamba layers go through a sequence in order, and have"),
    ),
    Limit(
        lambda t: t.model.get("cp_comm_type") not in (None, "a2a"),
        "of context parallelism only the exchange of heads keeps attention whole; model.cp_comm_type=a2a",
    ),
    Limit(has("should_pad_vocab"), "Megatron pads the vocabulary to a multiple of tp; model.should_pad_vocab=false"),
    Limit(
        # A program of its own may load its weights.
        lambda t: t.model.get("perform_initialization") is False and t.train,
        "tpi draws the initial weights, whatever it says; model.perform_initialization=true",
    ),
    Limit(
        lambda t: (
            not sft.is_sft(t.section("dataset"))
            and t.section("dataset").get("dataloader_type", "single") != "single"
        ),
        "which sequences a rank computes depends on dp; dataset.dataloader_type=single",
    ),
    Limit(
        lambda t: t.model.get("position_embedding_type", "rope") not in ("rope", "yarn", "none", LEARNED),
        f"of positions rotary and learned ones are covered; model.position_embedding_type=rope, yarn or {LEARNED}",
    ),
    Limit(
        lambda t: t.model.get("position_embedding_type") == LEARNED
        and (not t.numerics.covers(mode.LEARNED) or norms.other_layers(t)),
        "learned positions are covered for GPT models of numerics=tree, without multi-token prediction or layers of "
        "their own; model.position_embedding_type=rope",
    ),
    of(lambda t: t.model.get("position_embedding_type") == "yarn", *uncut("YaRN has")),
    Limit(
        lambda t: t.mixed_precision not in (None, "bf16_mixed") and not low_precision.enabled(t),
        "of Bridge's precisions only bf16_mixed is covered; precision=bf16 or precision=fp32",
    ),
    Limit(
        lambda t: (t.model.get("gtp_weight_remat_size") or 1) > 1,
        "weights spread over more ranks are not covered; model.gtp_weight_remat_size=1",
    ),
    Limit(
        lambda t: _name(t.model.get("attention_backend") or "auto") not in ATTENTION_BACKENDS,
        f"of attention only {', '.join(ATTENTION_BACKENDS[:-1])} and {ATTENTION_BACKENDS[-1]} are covered; "
        f"model.attention_backend=auto",
    ),
    Limit(
        lambda t: t.model.get("softmax_type", "vanilla") not in ("vanilla", "learnable"),
        "of attention sinks only those of each head are covered; model.softmax_type=learnable or vanilla",
    ),
    _sinks(*uncut("attention sinks have")),
    Limit(  # as seen on an H100: TE 2.20 and cuDNN 9.19 have none that is deterministic
        lambda t: t.model.get("softmax_type") == "learnable" and _name(t.model.get("attention_backend")) == "fused",
        "Transformer Engine has no deterministic fused attention with sinks; model.attention_backend=auto",
    ),
    _sinks(
        has("multi_latent_attention"),
        "multi-latent attention with sinks has no invariant version; model.softmax_type=vanilla",
    ),
    *(Limit(has(field), f"model.{field} is not covered; leave it unset") for field in OFF),
    Limit(
        has("tp_comm_overlap"),
        "overlapped collectives add in an order of their own; model.tp_comm_overlap=false",
    ),
    Limit(
        lambda t: not t.model.get("disable_bf16_reduced_precision_matmul"),
        "cuBLAS may add parts of a product in bf16; model.disable_bf16_reduced_precision_matmul=true",
    ),
    Limit(has("delay_wgrad_compute"), "delayed weight gradients are not covered; model.delay_wgrad_compute=false"),
    Limit(
        has("cross_entropy_loss_fusion"),
        "the fused cross entropy would bypass the invariant one; model.cross_entropy_loss_fusion=false",
    ),
)  # fmt: skip


def _name(value: Any) -> str:
    """Of a backend: as text in a tree, an enumeration in Megatron's configuration."""
    return getattr(value, "name", value)


def default_shards(model: dict[str, Any], precision: Any) -> int:
    """The default V in every layout: 8, or the largest smaller power of two that divides the model's sizes.

    precision: the section mixed_precision; in FP8 shards are multiples of 128 if they can be.
    """
    sizes = [*map(model.get, SHARDED), *delta_net.sharded(model).values()]
    shards = math.gcd(DEFAULT_SHARDS, *(size for size in sizes if isinstance(size, int)))
    in_fp8 = "fp8" in precision if isinstance(precision, str) else bool((precision or {}).get("fp8"))
    return math.gcd(shards, fp8.most_shards(model, precision)) if in_fp8 else shards


def problems(config: RunConfig) -> list[str]:
    """The limits that a run exceeds, then OR_STOCK, which avoids them all; nothing where there is none.

    A tp that does not divide the model either is left to the rules of the layout.
    """
    if not config.numerics.invariant:
        return _unread(config)
    layout_problems = _ranks(config) if layout.splits_unevenly(config) else []
    found = [limit for limit in limits(config) if limit not in layout_problems]
    return [*found, OR_STOCK] if found else []


def limits(config: RunConfig) -> list[str]:
    """Everything that keeps the run's numerics mode from being invariant; nothing for stock."""
    if not config.numerics.invariant:
        return []
    beyond = [limit.why for limit in LIMITS if limit.wrong(config)]
    beyond += model_fields.unknown(
        config.model, (*OFF, *experts.OFF, *latent.OFF, *multi_token.OFF, multi_token.PATTERN)
    )
    for section in allowed_fields.SECTIONS:
        beyond += allowed_fields.refused(section, config.section(section))
    return [
        *(f"numerics={config.numerics.mode}: {why}" for why in beyond),
        *(_shards(config) or _ranks(config) or _ragged(config)),
        *_data_shards(config),
        *_context_shards(config),
        *fp8.borders(config),
    ]


def _unread(config: RunConfig) -> list[str]:
    """What stock numerics would ignore."""
    of_data, of_context = config.numerics.data_shards, config.numerics.context_shards
    found = []
    if not config.numerics.adjust:
        found.append("numerics.adjust=false: numerics=stock adjusts nothing; leave it out")
    if of_data not in (None, config.parallel.data_parallel_size):
        found.append(f"numerics.data_shards={of_data}: numerics=stock has no data shards; leave it out")
    if of_context not in (None, config.model["context_parallel_size"]):
        found.append(f"numerics.context_shards={of_context}: numerics=stock has no context shards; leave it out")
    return found


def _shards(config: RunConfig) -> list[str]:
    shards = config.numerics.virtual_shards
    if not isinstance(shards, int) or shards < 1 or shards & (shards - 1):
        return [f"numerics.virtual_shards={shards}: must be a power of two"]
    sizes = {n: config.model[n] for n in SHARDED if config.model.get(n) is not None} | delta_net.sharded(config.model)
    totals = {f"model.{name}": size for name, size in sizes.items()}
    wrong = [f"{field}={total}" for field, total in totals.items() if total % shards]
    if wrong:
        common = math.gcd(*totals.values())
        return [
            f"numerics.virtual_shards={shards} does not divide {', '.join(wrong)}; "
            f"the largest that fits is numerics.virtual_shards={common & -common}"
        ]
    return []


def _ranks(config: RunConfig) -> list[str]:
    shards, tp = config.numerics.virtual_shards or 1, config.model["tensor_model_parallel_size"]
    if not isinstance(shards, int) or shards % tp == 0:
        return []
    return [f"tp={tp} does not divide numerics.virtual_shards={shards}; raise numerics.virtual_shards or change tp"]


_EVALUATED = "validation.eval_global_batch_size"


def _data_shards(config: RunConfig) -> list[str]:
    """What is wrong with D and dp."""
    shards, dp = config.numerics.data_shards, config.parallel.data_parallel_size
    sequences = config.train.get("global_batch_size") or 0  # 0: a program of its own
    if dp & (dp - 1):
        return [f"dp={dp}: the tree over data-parallel ranks needs a power of two; {_powers(sequences)}"]
    if shards is None:
        return []
    if not isinstance(shards, int) or shards < 1 or shards & (shards - 1):
        return [f"numerics.data_shards={shards}: must be a power of two"]
    found = []
    if shards % dp:
        found.append(f"dp={dp} does not divide numerics.data_shards={shards}; raise numerics.data_shards or lower dp")
    batches = {"gbs": sequences, _EVALUATED: config.section("validation").get("eval_global_batch_size") or 0}
    for name, size in batches.items():
        if size % shards:
            found.append(
                f"numerics.data_shards={shards} does not divide {name}={size}; the largest that fits is "
                f"numerics.data_shards={size & -size}"
            )
    return found


def _context_shards(config: RunConfig) -> list[str]:
    """What is wrong with C and cp."""
    shards, cp, model = config.numerics.context_shards, config.model["context_parallel_size"], config.model
    virtual, tp = config.numerics.virtual_shards or 1, model["tensor_model_parallel_size"]
    if shards is None:
        return [] if config.numerics.data_shards is None else ["numerics.context_shards must be a number; leave it out"]
    if not isinstance(shards, int) or shards < 1 or shards & (shards - 1):
        return [f"numerics.context_shards={shards}: must be a power of two"]
    if shards == cp == 1 or not isinstance(virtual, int) or virtual < 1:
        return []
    found = []
    if shards % cp:
        found.append(
            f"cp={cp} does not divide numerics.context_shards={shards}; raise numerics.context_shards or lower cp"
        )
    if cp & (cp - 1) == 0 and virtual % tp == 0 and virtual % (tp * cp):
        found.append(
            f"tp={tp} * cp={cp} does not divide numerics.virtual_shards={virtual}, whose heads the ranks share; the "
            f"largest that fits is cp={virtual // tp}"
        )
    # A shard is two chunks, and V chunks of the norms' gradients.
    parts, length = max(2, virtual), model["seq_length"]
    if length % (shards * parts):
        largest = max(1, (length & -length) // parts)
        found.append(
            f"numerics.context_shards={shards} of {parts} parts each do not divide seq={length}; the largest that fits "
            f"is numerics.context_shards={largest}"
        )
    return found


def _powers(sequences: int) -> str:
    largest = sequences & -sequences
    return f"the largest that fits gbs={sequences} is dp={largest}" if sequences else "dp=1, 2, 4 …"


def _ragged(config: RunConfig) -> list[str]:
    """What a CPU rounds in another way at the end of a row that fills no whole vector, with the V that avoids it."""
    if config.device.kind != "cpu":
        return []
    shards, tp = config.numerics.virtual_shards or 1, config.model["tensor_model_parallel_size"]
    found = _unfilled(config, shards)
    fewer = (1 << power for power in reversed(range(shards.bit_length() - 1)))
    fits = next((one for one in fewer if one % tp == 0 and not _unfilled(config, one)), None)
    return found if fits is None else [f"{line}; numerics.virtual_shards={fits} fits" for line in found]


def _unfilled(config: RunConfig, shards: int) -> list[str]:
    width = VECTORS * shards
    found = [
        f"model.{field}={config.model[field]}: on a CPU it must be a multiple of {width}"
        for field in ACTIVATED
        if (config.model.get(field) or 0) % width
    ]
    gated = delta_net.gated_numbers(config.model) // (shards * (config.numerics.context_shards or 1))
    if gated % VECTORS:
        found.append(
            f"model.{delta_net.ATTENTION_GATE}=true: on a CPU seq * model.num_attention_heads * model.kv_channels / "
            f"numerics.virtual_shards must be a multiple of {VECTORS}"
        )
    if experts.routed(config, shards) % VECTORS:
        found.append(
            f"numerics={config.numerics.mode}: on a CPU seq / numerics.virtual_shards / numerics.context_shards * "
            f"model.num_moe_experts must be a multiple of {VECTORS}"
        )
    return found
