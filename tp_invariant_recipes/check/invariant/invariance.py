# SPDX-License-Identifier: Apache-2.0
"""The limits of the invariant numerics."""

from functools import partial
from typing import Any

from tp_invariant_recipes.check import fsdp
from tp_invariant_recipes.check.invariant import fp8, shards
from tp_invariant_recipes.check.invariant import model as model_rules
from tp_invariant_recipes.check.invariant import modes as mode_rules
from tp_invariant_recipes.check.invariant import training as training_rules
from tp_invariant_recipes.check.rule import (
    Rule,
    becomes,
    cuts_sequences,
    has,
    lacks,
    limit,
    limit_of,
    name_of,
    uncut,
)
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.fields import catalogue
from tp_invariant_recipes.fields.field import as_text
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.megatron import covered_layers
from tp_invariant_recipes.settings import finetuning, low_precision, schema
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.schema import LEARNED

PRECISIONS = ("bf16", "fp32", "fp8_tensorwise", "fp8_blockwise", "mxfp8")
HYBRID_SIGNS = {*covered_layers.LAYERS, covered_layers.SEPARATOR}
*_OTHERS, _LAST = covered_layers.LAYERS

*_FIRST, _LATEST = (path.rpartition(".")[2] for path in schema.PROVIDERS)

_sinks = partial(limit_of, lambda t: t.model.get("softmax_type", "vanilla") != "vanilla")


def _fused_sinks(config: RunConfig) -> bool:
    return config.model.get("softmax_type") == "learnable" and name_of(config.model.get("attention_backend")) == "fused"


def _precision(config: RunConfig) -> Problem | None:
    precision, solve = config.mixed_precision, f"precision={', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}"
    if precision in (None, "bf16_mixed") or low_precision.enabled(config):
        return None
    return Problem(f"mixed_precision={as_text(precision)}", "that precision has no invariant version", solve)


def _fused_activation(config: RunConfig) -> Any:
    """Megatron's fused bias and GELU has tanh in place of erf."""
    function = config.model.get("activation_func")
    return "megatron.core.activations.fast_gelu" if str(function).endswith(".gelu") else function


def _padded_size(config: RunConfig) -> int:
    multiple = config.model.get("make_vocab_size_divisible_by") or 128  # Megatron's default
    return -(-config.shape.vocabulary // multiple) * multiple


_PADDED = "the vocabulary is padded as at tp=1, in every layout"

LIMITS = (
    limit(lambda t: t.numerics.initial_weights != "invariant", "Megatron draws other weights for every tp",
        "numerics.initial_weights=invariant"),
    limit_of(lacks(mode.FP64_NORM), lambda t: t.numerics.grad_norm != "exact",
        "an fp64 sum still depends on its order", "numerics.grad_norm=exact"),
    limit(lambda t: t.model.get("_target_") not in (None, *schema.PROVIDERS),
        f"of Bridge's models only {', '.join(_FIRST)} and {_LATEST} have invariant layers"),
    *model_rules.DELTA_NET_LIMITS,
    *model_rules.EXPERT_LIMITS,
    *model_rules.FAMILY_LIMITS,
    *mode_rules.GRAPH_LIMITS,
    *model_rules.LATENT_LIMITS,
    *model_rules.MULTI_TOKEN_LIMITS,
    *training_rules.MUON_LIMITS,
    *training_rules.PACKED_LIMITS,
    *mode_rules.PORTABLE_LIMITS,
    *training_rules.EXAMPLE_LIMITS,
    *fp8.LIMITS,
    *training_rules.LORA_LIMITS,
    limit_of(lambda t: t.shape.hybrid, lacks(mode.HYBRID), mode.only(mode.HYBRID)),
    limit(lambda t: set(t.shape.pattern) - HYBRID_SIGNS,
        f"of hybrid layers only {', '.join(_OTHERS)} and {_LAST} have invariant versions",
        "model.hybrid_layer_pattern"),
    *model_rules.NORM_LIMITS,
    limit(lambda t: (t.shape.biased and t.model.get("bias_activation_fusion") and not t.shape.gated),
        "a bias fused into an ungated activation has no invariant version", "model.bias_activation_fusion=false",
        adjust=becomes(_fused_activation, "model.activation_func", why="the bias' fused GELU is this one")
        + becomes(False, "model.bias_activation_fusion")),
    limit_of(cuts_sequences, lacks(mode.CONTEXT_SHARDS), mode.only(mode.CONTEXT_SHARDS),
        "cp=1, and leave numerics.context_shards out"),
    limit_of(lambda t: t.shape.hybrid, *uncut("Mamba layers go through a sequence in order, and have")),
    limit(has("should_pad_vocab"), "Megatron pads the vocabulary to a multiple of tp",
        "model.should_pad_vocab=false", adjust=becomes(_padded_size, "model.vocab_size", why=_PADDED)
        + becomes(False, "model.should_pad_vocab", why=_PADDED)),
    limit(
        # A program of its own may load its weights.
        lambda t: t.model.get("perform_initialization") is False and t.train,
        "tpi draws the initial weights, whatever its value", "model.perform_initialization=true",
    ),
    limit(
        lambda t: (
            not finetuning.is_sft(t.section("dataset"))
            and t.section("dataset").get("dataloader_type", "single") != "single"
        ),
        "which sequences a rank computes depends on dp", "dataset.dataloader_type=single",
    ),
    limit(
        lambda t: t.model.get("position_embedding_type") == LEARNED
        and (not t.numerics.covers(mode.LEARNED) or model_rules.other_layers(t)),
        "learned positions are covered for GPT models of numerics=tree, without MTP or own layers",
        "model.position_embedding_type=rope",
    ),
    limit_of(lambda t: t.model.get("position_embedding_type") == "yarn", *uncut("YaRN has")),
    limit(_precision),
    _sinks(*uncut("attention sinks have")),
    limit(  # as seen on an H100: TE 2.20 and cuDNN 9.19 have none that is deterministic
        _fused_sinks,
        "Transformer Engine has no deterministic fused attention with sinks", "model.attention_backend=auto",
    ),
    _sinks(has("multi_latent_attention"), "MLA with attention sinks has no invariant version",
        "model.softmax_type=vanilla"),
)  # fmt: skip


def _fields(config: RunConfig) -> list[Problem]:
    """Return the fields of Bridge with other values than their rows of the catalogue allow."""
    return [
        problem
        for name in ("model", *catalogue.SECTIONS)
        for problem in catalogue.refused(name, config.section(name), partial(schema.is_default, name, config.sections))
    ]


RULES = (*LIMITS, limit(_fields), *shards.RULES, *fsdp.INVARIANT_RULES, Rule(fp8.borders, stock=True))
