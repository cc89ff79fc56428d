# SPDX-License-Identifier: Apache-2.0
"""What the invariant modes cover of how a model is trained: Muon, examples, packed sequences, adapters."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from tp_invariant_recipes.check.invariant import fp8
from tp_invariant_recipes.check.rule import (
    Test,
    becomes,
    cuts_sequences,
    has,
    lacks,
    limit,
    limit_of,
    uncaptured,
    uncut,
)
from tp_invariant_recipes.cpu_host.vectors import VECTORS
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.fields.field import as_text
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.settings import cuda_graphs, finetuning, muon
from tp_invariant_recipes.settings.run_config import RunConfig

# The limits of Muon, which orthogonalises whole matrices (numerics/megatron/muon.py).


def _computes(config: RunConfig) -> bool:
    return muon.computes(config.section("optimizer"))


def _value(config: RunConfig, name: str) -> object:
    return config.section("optimizer").get(name, muon.READ[name])


def _unread(name: str) -> Test:
    return lambda t: not _computes(t) and _value(t, name) != muon.READ[name]


MUON_LIMITS = (
    limit(lambda t: _computes(t) and _value(t, muon.TP_MODE) != muon.WHOLE,
        "Muon would orthogonalise only a rank's shard of a matrix", f"optimizer.{muon.TP_MODE}={muon.WHOLE}",
        adjust=becomes(muon.WHOLE, f"optimizer.{muon.TP_MODE}", unset=True)),
    *(limit(_unread(name), f"optimizer.{name}: only Muon reads it", "leave it unset") for name in muon.READ),
    limit(lambda t: muon.is_layer_wise(t.section("optimizer")) and muon.owns_copies(t),
        "without data-parallel ranks Megatron-Core saves each copy of an expert as the only one",
        f"optimizer.{muon.LAYER_WISE}=false"),
    limit(lambda t: _computes(t) and finetuning.adapts(t), "adapters have not been trained with Muon",
        "optimizer.optimizer=adam"),
)  # fmt: skip


# What the invariant numerics cover of fine-tuning on examples.


OPTIONS = "dataset.dataset_kwargs"


def _options(config: RunConfig) -> Mapping[str, Any]:
    return config.at(OPTIONS) or {}


_example_row = partial(limit_of, lambda t: finetuning.is_sft(t.section("dataset")))
_per_token = partial(limit_of, has("calculate_per_token_loss"))

EXAMPLE_LIMITS = (
    _example_row(lacks(mode.FINETUNING), mode.only(mode.FINETUNING)),
    _example_row(lambda t: not _options(t).get("pad_to_max_length"),
        "how far an example is padded depends on the others of its rank",
        f"{OPTIONS}.pad_to_max_length=true",
        adjust=becomes(lambda t: {**_options(t), "pad_to_max_length": True}, OPTIONS, unset=True)),
    _example_row(lambda t: _options(t).get("get_attention_mask_from_fusion") is False,
        "a mask of the data's own has no invariant version",
        f"{OPTIONS}.get_attention_mask_from_fusion=true",
        adjust=becomes(lambda t: {**_options(t), "get_attention_mask_from_fusion": True}, OPTIONS)),
    _example_row(cuts_sequences,
        "fine-tuning with context parallelism is not covered: a shard may have no token that counts",
        "cp=1, and leave numerics.context_shards out"),
    _per_token(lacks(mode.TOKEN_LOSS), mode.only(mode.TOKEN_LOSS), "model.calculate_per_token_loss=false"),
    _per_token(cuts_sequences, "context-parallel ranks would count a sequence's tokens several times",
        "model.calculate_per_token_loss=false"),
)  # fmt: skip


# What the invariant numerics cover of packed sequences (numerics/megatron/attention/packed.py).

PADDED, _ENDS = (f"dataset.{finetuning.PACKING}.{name}" for name in ("pad_seq_to_mult", "pad_cu_seqlens"))
WITHOUT = "dataset.enable_offline_packing=false"


# Of a run with packed sequences, and of how they are packed.
_packed_row = partial(limit_of, lambda t: finetuning.packing(t) is not None, of=lambda t: (t, finetuning.packing(t)))


def divisors(config: RunConfig) -> tuple[int, ...]:
    """Return what divides the length of each packed sequence: V where it is known, and the tokens of a sum in FP8."""
    shards = config.numerics.virtual_shards
    known = (shards,) if isinstance(shards, int) and shards > 0 else ()
    return (*known, *((each,) if (each := fp8.tokens(config)) > 1 else ()))


def uneven(config: RunConfig, specs: Mapping[str, Any]) -> bool:
    """Whether one of `divisors` does not divide each packed sequence, or one is padded by less than two tokens."""
    multiple = specs.get("pad_seq_to_mult") or 1
    return multiple < 2 or any(multiple % divisor for divisor in divisors(config))


def _fitting(config: RunConfig) -> int:
    """Return the next multiple of what packed sequences are padded to that fits; 8 where nothing says what does."""
    multiple = (finetuning.packing(config) or {}).get("pad_seq_to_mult") or 1
    return max(2, math.lcm(multiple, *(divisors(config) or (8,))))


def _uneven_padding(config: RunConfig, specs: Mapping[str, Any]) -> Problem | None:
    if not uneven(config, specs):
        return None
    text = "virtual shards, and blocks in low precision, divide each packed sequence, and its padding is told apart"
    return Problem(f"{PADDED}={as_text(specs.get('pad_seq_to_mult'))}", text, f"{PADDED}={_fitting(config)}")


def _routed(config: RunConfig, specs: Mapping[str, Any]) -> int:
    """Return the number of router logits for a virtual shard of the shortest sequence; 0 without experts."""
    each = specs["pad_seq_to_mult"] // (config.numerics.virtual_shards or 1)
    return each * config.shape.experts


PACKED_LIMITS = (
    _packed_row(lambda t, _: lacks(mode.PACKED)(t), mode.only(mode.PACKED), WITHOUT),
    _packed_row(_uneven_padding, adjust=becomes(_fitting, PADDED)),
    _packed_row(lambda t, specs: specs.get("pad_cu_seqlens") or cuda_graphs.requested(t.model),
        "the number of sequences differs from row to row, and a captured step has one",
        f"cuda_graph=off, {_ENDS}=false", adjust=becomes(False, _ENDS)),
    _packed_row(lambda t, specs: t.device.kind == "cpu" and not uneven(t, specs) and _routed(t, specs) % VECTORS,
        f"on a CPU dataset.offline_packing_specs.pad_seq_to_mult / numerics.virtual_shards * model.num_moe_experts "
        f"must be a multiple of {VECTORS}"),
    _packed_row(lambda t, _: t.shape.depths and not t.model.get("calculate_per_token_loss"),
        "MTP of packed sequences is covered where each token counts alike",
        "model.calculate_per_token_loss=true"),
    _packed_row(lambda t, _: t.ledger.trace is not None,
        "a trace has one entry for the module of a row, which runs once for each sequence", "leave ledger.trace out"),
)  # fmt: skip


# What the invariant numerics cover of LoRA.


def of_experts(config: RunConfig, fields: Mapping[str, Any]) -> bool:
    """Whether adapters are of experts: feed-forward layers of a model with experts have all one name."""
    return bool(config.shape.experts) and finetuning.of_feed_forward(fields)


# Of a run with adapters, and of its section.
_lora_row = partial(limit_of, finetuning.adapts, of=lambda t: (t, finetuning.section(t)))

LORA_LIMITS = (
    _lora_row(lambda t, _: not t.numerics.covers(mode.LORA), mode.only(mode.LORA)),
    _lora_row(
        lambda t, fields: not finetuning.targets(fields) or {*finetuning.targets(fields)} - {*finetuning.TARGETS},
        f"of layers only {', '.join(finetuning.TARGETS)} have invariant adapters, in all layers alike",
        "name these in peft.target_modules"),
    limit_of(finetuning.adapts, *uncut("LoRA has")),
    limit_of(finetuning.adapts, *uncaptured("adapters have")),
    _lora_row(lambda t, _: t.model.get("pipeline_model_parallel_layout"),
        "a stage without layers has no adapter to send a gradient to", "model.pipeline_model_parallel_layout=null"),
)  # fmt: skip
