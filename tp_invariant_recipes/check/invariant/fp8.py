# SPDX-License-Identifier: Apache-2.0
"""The limits of FP8 products under invariant numerics: which recipes, which models, and borders of shards.

A block of numbers that share a scale has 128, so blockwise every part of a sum that a layout may cut is a multiple of
128. With one scale a tensor it is one of 16, as cuBLAS takes it: numbers beyond the end of a sum are
zeros (kernels/gemm/fp8_tiles.py). A sum over tokens has a multiple of 128 of them with either. In MXFP8 each is one
of 32.
"""

import math
from functools import partial
from typing import Any

from tp_invariant_recipes.check.rule import Adjusted, Test, becomes, lacks, limit_of
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings import low_precision
from tp_invariant_recipes.settings.model_shape import ModelShape
from tp_invariant_recipes.settings.run_config import RunConfig

_INSTEAD = "precision=fp8_tensorwise, precision=fp8_blockwise or precision=mxfp8"
# Fields that `summed` reads, and the sizes of gated delta nets, which V divides.
SIZES = (
    *("hidden_size", "ffn_hidden_size", "kv_channels", "multi_latent_attention", "q_lora_rank", "kv_lora_rank"),
    *("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "num_attention_heads", "num_query_groups"),
    *("attention_output_gate", "mamba_num_heads", "mamba_head_dim", "mamba_num_groups", "mamba_state_dim"),
    *("num_moe_experts", "moe_layer_freq", "moe_shared_expert_intermediate_size"),
    families.VARIANT,
    *families.DELTA_SIZES,
)
_ATTENTION = ("fp8_dot_product_attention", "fp8_multi_head_attention")
BLOCKWISE, MXFP8 = "blockwise", low_precision.MXFP8
BLOCK = 128  # as of kernels/gemm/quantize.py, which imports torch
# Recipe -> of what each part of a sum over features, and over tokens, is a multiple; as of kernels/gemm/mxfp8.py
# 32.
UNITS = {"tensorwise": (low_precision.MULTIPLE, BLOCK), BLOCKWISE: (BLOCK, BLOCK), MXFP8: (32, 32)}


_row = partial(limit_of, low_precision.enabled)
_fp8 = partial(limit_of, lambda t: low_precision.fp8_layers(t) is not None)  # of recipes that there are


def _named(config: RunConfig, *words: str) -> bool:
    """Whether a recipe of Bridge's, or the recipe of FP8 that the fields name, has one of these words in its name."""
    precision = config.mixed_precision
    name = precision if isinstance(precision, str) else str((precision or {}).get("fp8_recipe") or "")
    return any(word in name for word in words)


def _fields(config: RunConfig) -> dict[str, Any]:
    return low_precision.fields(config.mixed_precision)


def _sets(*names: str) -> Test:
    return lambda t: any(_fields(t).get(name) or t.model.get(name) for name in names)


def _off(*names: str) -> tuple[Adjusted, ...]:
    return becomes(False, " ".join(f"mixed_precision.{name}" for name in names))


def _other_recipe(config: RunConfig) -> bool:
    return bool(config.mixed_precision) and not (
        low_precision.fp8_layers(config) is not None
        or _named(config, "fp4", "delayed")
        or _sets("fp4")(config)
        or config.model.get("fp8")
    )


LIMITS = (
    _row(lambda t: _named(t, "fp4") or _sets("fp4")(t), "FP4 GEMMs have no definition here", "precision=bf16"),
    _row(lambda t: _named(t, "delayed"), "delayed scaling takes scales from what a rank held in the steps before",
        f"{_INSTEAD}"),
    _row(_other_recipe,
        f"of FP8 only the recipes {', '.join(low_precision.NAMED)} and fields like theirs are covered",
        f"{_INSTEAD}"),
    _row(lambda t: t.model.get("fp8"), "the precision decides what is in FP8", f"model.fp8=null, {_INSTEAD}"),
    _fp8(lacks(mode.FP8), mode.only(mode.FP8)),
    _fp8(_sets(*low_precision.FP8_WEIGHTS), "weights kept in FP8 between steps have scales of Megatron's",
        "mixed_precision.fp8_param_gather=false", adjust=_off(*low_precision.FP8_WEIGHTS)),
    _fp8(_sets(low_precision.REUSED), "gradients' memory holds gradients alone",
        f"mixed_precision.{low_precision.REUSED}=false", adjust=_off(low_precision.REUSED)),
    _fp8(_sets(*_ATTENTION), "attention in FP8 has no invariant version",
        ", ".join(f"mixed_precision.{name}=false" for name in _ATTENTION), adjust=_off(*_ATTENTION)),
    _fp8(lambda t: _fields(t).get("fp8_wgrad") is False, "weight gradients are in FP8, too",
        "mixed_precision.fp8_wgrad=true"),
    _fp8(lambda t: _fields(t).get("fp16") or not _fields(t).get("bf16", True), "what is not in FP8 is in bf16",
        "mixed_precision.bf16=true"),
)  # fmt: skip


def tokens(config: RunConfig) -> int:
    """Of what the tokens of a sum are a multiple; 1 where no product is in FP8."""
    layers = low_precision.fp8_layers(config)
    return 1 if layers is None else UNITS[layers.recipe][1]


def summed(shape: ModelShape, *, blocks: bool) -> dict[str, int]:
    """Return what V shards divide in sums of FP8 products: how a message names it -> its size.

    Of Mamba's dt a shard has a few numbers: without blocks any number of them. So it has of a delta net's α and β.
    """
    return _of_attention(shape) | _of_feed_forward(shape) | _of_recurrent_layers(shape, blocks)


def _of_attention(shape: ModelShape) -> dict[str, int]:
    heads = shape.heads
    if shape.latent:
        return {
            "the width of queries": heads * (shape.key_width + shape.turned_key),
            "the width of keys and values": heads * (shape.key_width + shape.value_width),
            "the heads' width (model.num_attention_heads * model.v_head_dim)": heads * shape.value_width,
        }
    queries = 2 if shape.fields.get("attention_output_gate") else 1
    return {
        "the heads' width (model.num_attention_heads * model.kv_channels)": heads * shape.head_width,
        "the width of queries, keys and values": (queries * heads + 2 * shape.groups) * shape.head_width,
    }


def _of_feed_forward(shape: ModelShape) -> dict[str, int]:
    sizes = {"model.moe_shared_expert_intermediate_size": shape.shared_width} if shape.shared_width else {}
    if shape.experts and shape.expert_layers == 1:
        return sizes
    return {"model.ffn_hidden_size": shape.fields.get("ffn_hidden_size") or 0, **sizes}


def _of_recurrent_layers(shape: ModelShape, blocks: bool) -> dict[str, int]:
    """Return the sizes of Mamba's layers and of gated delta nets."""
    sizes = {}
    if shape.mamba_heads:
        sizes = {
            "the width of Mamba's x and z": shape.mamba_heads * (shape.mamba_width or 64),
            "the width of Mamba's B and C": (shape.mamba_groups or 8) * (shape.mamba_state or 128),
            "the width of Mamba's dt (model.mamba_num_heads)": shape.mamba_heads if blocks else 0,
        }
    keys, values, heads = families.delta_widths(shape.fields)
    if heads:
        sizes |= {
            "the width of gated delta nets' keys": keys,
            "the width of gated delta nets' values": values,
            "the width of gated delta nets' alpha (model.linear_num_value_heads)": heads if blocks else 0,
        }
    return sizes


def most_shards(model: dict[str, Any], precision: Any) -> int:
    """Return the largest V, a power of two, whose shards are multiples of what the recipe needs; at least 1.

    Blockwise Mamba's dt does not count: `borders` says what to do about it.
    precision: the section mixed_precision.
    """
    recipe = low_precision.fields(precision).get("fp8_recipe")
    common = math.gcd(*summed(ModelShape(model), blocks=recipe == MXFP8).values())
    parts = common // UNITS.get(recipe or "", UNITS["tensorwise"])[0]
    return max(1, parts & -parts)


def borders(config: RunConfig) -> list[Problem]:
    """Return what ends between two multiples of what the recipe needs."""
    layers = low_precision.fp8_layers(config)
    if layers is None:
        return []
    unit, of_tokens = UNITS[layers.recipe]
    sums = summed(config.shape, blocks=layers.recipe != "tensorwise")
    sides = [
        Problem("", f"{name} is {size}: {_why(layers.recipe)}", f"the next is {_next(size, unit)}")
        for name, size in {**_not_divided(config), **sums}.items()
        if size % unit
    ]
    contexts, length = config.numerics.context_shards or config.layout.cp, config.shape.sequence
    each = f" in each of {contexts} context shards" if contexts > 1 else ""
    text = f"weight gradients in FP8 add {of_tokens} tokens at a time{each}"
    problem = Problem(f"seq={length}", text, f"the next is seq={_next(length, of_tokens * contexts)}")
    return [*(sides or _cut(config, sums, layers.recipe)), *([problem] if length % (of_tokens * contexts) else [])]


def _not_divided(config: RunConfig) -> dict[str, int]:
    """Return the sides of matrices that no shards divide."""
    shape, latents = config.shape, ("q_lora_rank", "kv_lora_rank")
    sides = {"model.hidden_size": shape.hidden}
    if shape.latent:
        sides |= {f"model.{name}": config.model[name] for name in latents if config.model.get(name)}
    return {**sides, "model.moe_ffn_hidden_size": shape.expert_width} if shape.experts else sides


def _why(recipe: str) -> str:
    unit = UNITS[recipe][0]
    return {
        BLOCKWISE: f"FP8 GEMMs add {unit} numbers at a time",
        MXFP8: f"in MXFP8 {unit} numbers of a sum share a scale",
    }.get(recipe, f"FP8 matrices have sides in steps of {unit}")


def _cut(config: RunConfig, sums: dict[str, int], recipe: str) -> list[Problem]:
    """Return the problem of sums whose shards end between two multiples."""
    unit, shards = UNITS[recipe][0], config.numerics.virtual_shards or 1
    cut = ", ".join(f"{name} is {size}" for name, size in sums.items() if size % (unit * shards))
    if not cut:
        return []
    common = math.gcd(*sums.values()) // unit
    fits = common & -common
    tensorwise_helps = recipe != "tensorwise" and fits % config.layout.tp
    solve = f"the largest that fits is numerics.virtual_shards={fits}"
    text = f"numerics.virtual_shards={shards} splits sums between multiples of {unit}: {_why(recipe)} ({cut})"
    return [Problem("", text, "precision=fp8_tensorwise" if tensorwise_helps else solve)]


def _next(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
