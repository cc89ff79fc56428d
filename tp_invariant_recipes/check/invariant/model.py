# SPDX-License-Identifier: Apache-2.0
"""What the invariant modes cover of a model: latents, tokens ahead, gated delta nets, families, norms and experts."""

from functools import partial

from tp_invariant_recipes.check.rule import (
    Rule,
    Test,
    becomes,
    has,
    lacks,
    limit,
    limit_of,
    name_of,
    uncaptured,
    uncut,
    unsplit,
)
from tp_invariant_recipes.cpu_host.vectors import VECTORS
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.fields.field import as_text
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.layers.experts import expert_placement
from tp_invariant_recipes.numerics.megatron import covered_layers, families
from tp_invariant_recipes.numerics.megatron.families import layers_alike
from tp_invariant_recipes.settings import cuda_graphs, finetuning, low_precision, schema
from tp_invariant_recipes.settings.delta_net import (
    ATTENTION_GATE,
    EXPERT_GATE,
    FREQUENCY,
    RECOMPUTED,
    SPEC,
    TAPS,
    has_it,
)
from tp_invariant_recipes.settings.run_config import RunConfig

# The limits of invariant multi-latent attention (megatron/attention/mla.py), for models that have it.

LATENT_FIELD = "multi_latent_attention"


def is_mla(config: RunConfig) -> bool:
    """Whether the model has multi-latent attention; only its provider makes models with it."""
    return bool(config.model.get(LATENT_FIELD)) or config.model.get("_target_") == schema.LATENT


_latent_row = partial(limit_of, is_mla)

LATENT_LIMITS = (
    _latent_row(lambda t: t.model.get("_target_") != schema.LATENT or not t.model.get(LATENT_FIELD),
        f"multi-latent attention is covered for {schema.LATENT.rpartition('.')[2]} "
        f"with model.{LATENT_FIELD}=true alone"),
    _latent_row(lacks(mode.LATENT), mode.only(mode.LATENT)),
    _latent_row(*unsplit("multi-latent attention under tensor parallelism needs")),
    _latent_row(*uncut("multi-latent attention has")),
    _latent_row(lambda t: t.shape.groups != t.shape.heads,
        "multi-latent attention has keys and values for every head", "leave model.num_query_groups unset"),
    _latent_row(lambda t: not t.shape.head_norms, "multi-latent attention is covered with its norms of latents",
        "model.qk_layernorm=true"),
    _latent_row(lambda t: t.shape.biased or t.model.get("add_qkv_bias"),
        "multi-latent attention with biases is not covered", "model.add_bias_linear=false, model.add_qkv_bias=false"),
    _latent_row(has("apply_rope_fusion"),
        "the fused rotation of multi-latent attention adds up the shared key's gradient in an order of its own",
        "model.apply_rope_fusion=false", adjust=becomes(False, "model.apply_rope_fusion")),
    _latent_row(has("recompute_granularity"),
        "recomputation of multi-latent attention was not shown to have the same bits",
        "model.recompute_granularity=null", adjust=becomes(None, "model.recompute_granularity")),
)  # fmt: skip


# What the invariant numerics cover of MTP (numerics/megatron/mtp.py).

MULTI_TOKEN = "mtp_num_layers"
REPEATED = "mtp_use_repeated_layer"
PATTERN = "mtp_hybrid_override_pattern"
WITHOUT = f"model.{MULTI_TOKEN}=null"


def _before_the_last(stages: str | list[list[str]] | None) -> bool:
    """Whether a layout of stages has layers of MTP before the last stage. "Et|(tt|)*30mL": no."""
    if isinstance(stages, str):
        return "m" in stages.rpartition("|")[0]
    return any("mtp" in stage for stage in (stages or ())[:-1])


_ahead_row = partial(limit_of, has(MULTI_TOKEN))


def _recomputes_several_layers(config: RunConfig) -> bool:
    return config.model.get("recompute_granularity") == "full" and (
        (config.model.get("recompute_method"), config.model.get("recompute_num_layers")) != ("uniform", 1)
    )


MULTI_TOKEN_LIMITS = (
    _ahead_row(lacks(mode.MTP), mode.only(mode.MTP), WITHOUT),
    _ahead_row(lambda t: t.shape.hybrid and not t.model.get(PATTERN),
        "MTP of a hybrid model has no layers", f"model.{PATTERN}='*E', or {WITHOUT}"),
    _ahead_row(lambda t: t.shape.hybrid and set(t.model.get(PATTERN) or "") - {*covered_layers.LAYERS},
        f"of hybrid layers only {' '.join(covered_layers.LAYERS)} have invariant versions", f"model.{PATTERN}"),
    _ahead_row(lambda t: not t.shape.hybrid and t.model.get(REPEATED),
        "one layer for all depths is covered for hybrid models alone", f"model.{REPEATED}=false"),
    # Bridge adds these layers to the pattern, whatever mtp_num_layers is.
    limit_of(has(PATTERN), lambda t: not t.model.get(MULTI_TOKEN),
        f"model.{PATTERN} adds layers of MTP", f"model.{PATTERN}=null, {WITHOUT}"),
    _ahead_row(*uncut("MTP has")),
    _ahead_row(*uncaptured("MTP has", f", or {WITHOUT}")),
    _ahead_row(lambda t: _before_the_last(t.model.get("pipeline_model_parallel_layout")),
        "the layers of MTP are on the last stage, beside the loss",
        "model.pipeline_model_parallel_layout=null"),
    _ahead_row(lambda t: t.shape.hybrid and t.model.get("recompute_granularity") == "full",
        "MTP of a hybrid model was not shown to have the same bits where "
        "whole layers are recomputed", "model.recompute_granularity=selective"),
    _ahead_row(_recomputes_several_layers, "Megatron-Core recomputes the layers of MTP one by one",
        "model.recompute_method=uniform, model.recompute_num_layers=1"),
)  # fmt: skip


# What the invariant numerics cover of gated delta nets (numerics/megatron/families/delta_net.py) and of gates.


def _gates(config: RunConfig) -> bool:
    return bool(config.model.get(ATTENTION_GATE) or config.model.get(EXPERT_GATE))


_delta_row = partial(limit_of, lambda t: has_it(t.model))

DELTA_NET_LIMITS = (
    _delta_row(lacks(mode.DELTA_NET), mode.only(mode.DELTA_NET), "numerics=tree"),
    limit_of(_gates, lacks(mode.GATES), mode.only(mode.GATES), "numerics=tree"),
    limit_of(has(ATTENTION_GATE), is_mla, "multi-latent attention has no gate", f"model.{ATTENTION_GATE}=false"),
    _delta_row(lambda t: t.model.get("_target_") != schema.PROVIDERS[0],
        f"gated delta nets are covered for {schema.PROVIDERS[0].rpartition('.')[2]} alone"),
    _delta_row(lambda t: t.model.get(families.FIELD) not in (None, SPEC), "gated delta nets have layers of tpi's",
        f"model.{families.FIELD}=null"),
    _delta_row(lambda t: t.model.get(FREQUENCY) is None,
        "the frequency of attention layers among gated delta nets is not set", f"model.{FREQUENCY}=4"),
    _delta_row(lambda t: t.model.get(TAPS, 4) != 4, "the convolution takes four tokens", f"model.{TAPS}=4"),
    _delta_row(*unsplit("gated delta nets under tensor parallelism need")),
    limit_of(lambda t: has_it(t.model) or _gates(t), *uncut("gated delta nets and gates have")),
    _delta_row(lambda t: finetuning.packing(t) is not None,
        "packed sequences in gated delta nets have no invariant version", "dataset.enable_offline_packing=false"),
    _delta_row(finetuning.section, "adapters of gated delta nets have no invariant version", "peft=none"),
    _delta_row(lambda t: RECOMPUTED in (t.model.get("recompute_modules") or ()),
        f"gated delta nets keep what {RECOMPUTED} would compute again", "leave it out of model.recompute_modules"),
    _delta_row(has("add_bias_linear"), "gated delta nets have no biases", "model.add_bias_linear=false"),
)  # fmt: skip


# What the invariant numerics cover of families with layers of their own (numerics/megatron/families).


def _has_own_layers(config: RunConfig) -> bool:
    return families.family_of(config.model) is not None


def _family_row(wrong: Test, text: str, solve: str = "") -> Rule[RunConfig]:
    """Of a run of such a family. text: after its name."""
    return limit_of(_has_own_layers, wrong, f"a family with layers of its own {text}", solve)


FAMILY_LIMITS = (
    limit_of(_has_own_layers, lacks(mode.FAMILIES), mode.only(mode.FAMILIES), "numerics=tree"),
    _family_row(*uncut("has")),
    _family_row(low_precision.enabled, "has no version in FP8", "precision=bf16"),
    _family_row(*uncaptured("has")),
    _family_row(has("is_vision_language"), "sees no images", "model.is_vision_language=false"),
    _family_row(lambda t: t.model.get("scatter_embedding_sequence_parallel") is False, "scatters its embeddings",
        "model.scatter_embedding_sequence_parallel=true"),
    _family_row(has("mtp_num_layers"), "has no MTP", "model.mtp_num_layers=null"),
    _family_row(has("add_bias_linear"), "has no biases", "model.add_bias_linear=false"),
)  # fmt: skip


# What the invariant numerics cover of norms over the hidden size (numerics/megatron/base.py).

RMS, LAYER = "RMSNorm", "LayerNorm"


def other_layers(config: RunConfig) -> bool:
    """Whether a model has layers that no plain GPT model has."""
    model = config.model
    own = config.shape.hybrid or families.family_of(model) or families.delta_sizes(model)
    return bool(own or is_mla(config) or config.shape.depths)


_of_layer_norms = partial(limit_of, lambda t: t.model.get("normalization") == LAYER)

NORM_LIMITS = (
    limit(lambda t: t.model.get("normalization") not in (RMS, LAYER), f"of norms only {RMS} and {LAYER} are covered",
        f"model.normalization={RMS}"),
    _of_layer_norms(lacks(mode.LAYER_NORM), mode.only(mode.LAYER_NORM), f"model.normalization={RMS}"),
    _of_layer_norms(other_layers,
        f"{LAYER} is covered for GPT models without MTP or layers of their own",
        f"model.normalization={RMS}"),
    _of_layer_norms(has("qk_layernorm"), f"of norms of queries and keys only {RMS} is covered",
        "model.qk_layernorm=false"),
    limit_of(has("layernorm_zero_centered_gamma"), lacks(mode.CENTRED), mode.only(mode.CENTRED),
        "model.layernorm_zero_centered_gamma=false"),
)  # fmt: skip


# The limits of the invariant experts, for models with experts.

LATENT = "moe_latent_size"  # experts see so many features, projected from the hidden size

Z_LOSS = "moe_z_loss_coeff"
GLOBAL = "global_aux_loss"  # of a data shard's sequences so far

_expert_row = partial(limit_of, has("num_moe_experts"))
_of_latents = partial(limit_of, lambda t: t.shape.experts and t.model.get(LATENT))


def _owned(config: RunConfig) -> bool:
    return expert_placement.fits(config.shape.experts, config.layout.tp, config.layout.ep)


def _shared_by(config: RunConfig) -> int:
    """ep * etp ranks, where they can share whole experts."""
    ep, more = config.layout.ep, config.layout.ep * config.layout.etp
    return more if expert_placement.fits(config.shape.experts, config.layout.tp, more) else ep


def routed(config: RunConfig, shards: int) -> int:
    """Return the number of router logits for a virtual shard of one context shard, or 0 if C is not valid."""
    contexts = config.numerics.context_shards or 1
    if not (isinstance(contexts, int) and contexts > 0):
        return 0
    return config.shape.sequence // (shards * contexts) * config.shape.experts


def mixed(config: RunConfig) -> bool:
    """Whether some layers of a model with experts are dense."""
    return bool(config.shape.experts) and not layers_alike(config.shape.expert_layers)


def _of_experts(config: RunConfig) -> str | None:
    """Return the activation's name in numerics/layers/experts/experts.py."""
    kinds = {("silu", True): "swiglu", ("quick_gelu", True): "swiglu", ("squared_relu", False): "squared_relu"}
    return kinds.get((name_of(config.model.get("activation_func")), config.shape.gated))


def _activation_func(config: RunConfig) -> Problem | None:
    text = "of the experts' activations only SwiGLU, quick GELU with a gate and squared ReLU are covered"
    field, solve = "model.activation_func", "model.activation_func=torch.nn.functional.silu"
    return None if _of_experts(config) else Problem(f"{field}={as_text(config.at(field))}", text, solve)


def _counts_packed_sequences(config: RunConfig) -> bool:
    return config.model.get("moe_router_load_balancing_type") == GLOBAL and finetuning.packing(config) is not None


def _counts_captured_sequences(config: RunConfig) -> bool:
    return config.model.get("moe_router_load_balancing_type") == GLOBAL and cuda_graphs.requested(config.model)


# Settings that a model with experts must not have, and the reason.
EXPERT_LIMITS = (
    _expert_row(lacks(mode.EXPERTS), mode.only(mode.EXPERTS)),
    _expert_row(lambda t: t.layout.etp > 1, "experts split over ranks have no invariant version", "etp=1",
        adjust=becomes(_shared_by, "model.expert_model_parallel_size")
        + becomes(1, "model.expert_tensor_parallel_size")),
    _expert_row(lambda t: not _owned(t),
        "each expert needs one rank that computes it: of tp and ep one must divide the other, and both "
        "model.num_moe_experts"),
    _expert_row(lambda t: t.device.kind == "cpu" and t.shape.expert_width % VECTORS,
        f"on a CPU model.moe_ffn_hidden_size must be a multiple of {VECTORS}"),
    _of_latents(*uncut("experts of latents have")),
    _of_latents(has("add_bias_linear"), "experts of latents are covered without biases", "model.add_bias_linear=false"),
    _of_latents(*uncaptured("experts of latents have")),
    _of_latents(low_precision.enabled, "experts of latents have no invariant version in FP8", "precision=bf16"),
    _expert_row(_activation_func),
    _expert_row(_counts_packed_sequences,
        f"the sequences of a packed row come in another order than {GLOBAL} counts them",
        "model.moe_router_load_balancing_type=seq_aux_loss"),
    _expert_row(_counts_captured_sequences, f"{GLOBAL} counts sequences where a captured layer cannot",
        "cuda_graph=off"),
    _expert_row(lambda t: t.model.get(Z_LOSS) and t.model.get("mtp_use_repeated_layer"),
        "one layer for all depths of MTP has no z-loss", f"model.{Z_LOSS}=null"),
)  # fmt: skip
