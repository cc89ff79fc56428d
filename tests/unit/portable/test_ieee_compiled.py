# SPDX-License-Identifier: Apache-2.0
"""What Triton makes of the portable kernels for Hopper and Blackwell, without a GPU: every fp32 operation rounds once.

PTX spells a rounded operation `add.rn.f32`; ptxas may contract an `add.f32`. `.approx` and `.ftz` are other operations.
"""

import functools
import re

import pytest

from tests.unit.kernels.compiled import ptx
from tp_invariant_recipes.portable.ieee import adam as ieee_adam
from tp_invariant_recipes.portable.ieee import attention_triton as ieee_attention_triton
from tp_invariant_recipes.portable.ieee import cross_entropy as ieee_cross_entropy
from tp_invariant_recipes.portable.ieee import delta_rule as ieee_delta
from tp_invariant_recipes.portable.ieee import draw as ieee_draw
from tp_invariant_recipes.portable.ieee import norm as ieee_norm
from tp_invariant_recipes.portable.ieee import rotary as ieee_rotary
from tp_invariant_recipes.portable.ieee import router as ieee_router
from tp_invariant_recipes.portable.ieee import storage as ieee_samples
from tp_invariant_recipes.portable.ieee import swiglu as ieee_swiglu
from tp_invariant_recipes.portable.shared_source import UNFUSED

ATTENTION = {"size": "i32", "batch": "i32", "scale": "fp32"}
HEADS = {"HEADS": 16, "GROUPS": 8, "WIDTH": 128}


def of_attention(table):
    """The constants of a kernel of attention with 128 features."""
    return HEADS | {"FOLD": 128, "FEATURES": 128, "QUERIES": table[128].queries, "KEYS": table[128].keys}


# kernel -> types of its tensors and numbers, its constants
KERNELS = {
    ieee_norm.FORWARD: (
        {"x": "*i16", "weight": "*i16", "y": "*i16", "scale": "*fp32", "rows": "i32", "eps": "fp32"},
        {"WIDTH": 1000, "COLUMNS": 1024, "ROWS": 4},
    ),
    ieee_norm.BACKWARD: (
        {"dy": "*i16", "x": "*i16", "weight": "*i16", "scale": "*fp32", "dx": "*i16", "gradient": "*fp32"}
        | dict.fromkeys(("heads", "token_step", "head_step"), "i32"),
        {"GROUP": 1, "ROWS_OF_LEAF": 4, "LEAVES": 8}
        | {"WIDTH": 128, "COLUMNS": 128, "LANES": 4, "BLOCK": 32, "ROWS": 2},
    ),
    ieee_swiglu.FORWARD: ({"x": "*i16", "p": "*i16", "y": "*i16"}, {"WIDTH": 768, "WEIGHTED": True, "BLOCK": 1024}),
    ieee_swiglu.BACKWARD: (
        {"dy": "*i16", "x": "*i16", "p": "*i16", "dx": "*i16", "dp": "*i16"},
        {"WIDTH": 768, "WEIGHTED": True, "LANES": 1024},
    ),
    ieee_rotary.ROTATE: (
        {"x": "*i16", "cos": "*fp32", "sin": "*fp32", "y": "*i16", "rows": "i32", "rows_of_position": "i32"},
        {"HALF": 64, "WIDTH": 128, "COLUMNS": 64, "REST": 1, "ROWS": 16},
    ),
    ieee_cross_entropy.SUM: (
        {"logits": "*i16", "highest": "*fp32", "sums": "*fp32", "shards": "i32"},
        {"SIZE": 1900, "LANES": 1024},
    ),
    ieee_cross_entropy.GRADIENT: (
        {"logits": "*i16", "index": "*i64", "highest": "*fp32", "total": "*fp32", "gradient": "*fp32", "out": "*i16"}
        | {"size": "i32"},
        {"BLOCK": 1024},
    ),
    ieee_cross_entropy.LOG: ({"total": "*fp32", "out": "*fp32", "size": "i32"}, {"BLOCK": 128}),
    ieee_router.FORWARD: (
        {"logits": "*i16", "probs": "*i16", "scores": "*fp32", "chosen": "*i8"},
        {"TOPK": 8, "EXPERTS": 128, "COLUMNS": 128},
    ),
    ieee_router.BACKWARD: (
        {"dprobs": "*i16", "dscores": "*fp32", "logits": "*i16", "chosen": "*i8", "out": "*i16"},
        {"EXPERTS": 128, "COLUMNS": 128},
    ),
    ieee_attention_triton.FORWARD: (
        dict.fromkeys(("query", "key", "value", "out"), "*bf16") | {"top": "*fp32", "inverse": "*fp32"} | ATTENTION,
        of_attention(ieee_attention_triton.FORWARD_TILES) | {"LANES": ieee_attention_triton.LANES},
    ),
    ieee_attention_triton.BACKWARD_QUERY: (
        dict.fromkeys(("gradient", "query", "key", "value", "out"), "*bf16")
        | dict.fromkeys(("top", "inverse", "along"), "*fp32")
        | {"dq": "*bf16"}
        | ATTENTION
        | {"scale_of_gradients": "fp32"},
        of_attention(ieee_attention_triton.QUERY_TILES),
    ),
    ieee_attention_triton.BACKWARD_KEY: (
        dict.fromkeys(("gradient", "query", "key", "value"), "*bf16")
        | dict.fromkeys(("top", "inverse", "along", "dk", "dv"), "*fp32")
        | ATTENTION,
        of_attention(ieee_attention_triton.KEY_TILES),
    ),
    ieee_attention_triton.SUM_OF_HEADS: (
        {"dk_of_heads": "*fp32", "dv_of_heads": "*fp32", "dk": "*bf16", "dv": "*bf16"} | ATTENTION,
        HEADS | {"BLOCK": ieee_attention_triton.BLOCK},
    ),
    ieee_samples.SAMPLES: ({"x": "*fp32", "out": "*fp32", "size": "i32"}, {"KIND": 4, "BLOCK": 128}),
    ieee_delta.DELTA: (
        dict.fromkeys(("q", "k", "v", "decay", "strength", "states", "out"), "*fp32")
        | {"spans": "*i32", "step": "i32"},
        {"HEADS": 4, "KEY": 128, "COLUMNS": 128, "VALUE": 128, "ROWS": ieee_delta.ROWS},
    ),
    ieee_draw.RACE: (
        {"scores": "*fp32", "highest": "*fp32", "do_sample": "*i32", "temperature": "*fp32", "keys": "*i64"}
        | {"limits": "*i32", "out": "*i64", "size": "i32", "parts": "i32"},
        {},
    ),
    ieee_draw.BEFORE: (
        dict.fromkeys(("scores", "highest", "temperature"), "*fp32")
        | {"limits": "*i32", "best": "*i64", "out": "*i64", "size": "i32", "parts": "i32"},
        {},
    ),
    ieee_draw.AGAIN: (
        {"scores": "*fp32", "highest": "*fp32", "do_sample": "*i32", "temperature": "*fp32", "keys": "*i64"}
        | {"limits": "*i32", "needed": "*i64", "best": "*i64", "size": "i32"},
        {},
    ),
    ieee_adam.STEP: (
        dict.fromkeys("pgmv", "*fp32") | {"size": "i32"} | dict.fromkeys(ieee_adam.AdamNumbers._fields, "fp32"),
        {"DECOUPLED": True, "BLOCK": 128},
    ),
}
OPERATION = re.compile(r"^\s+(?:@!?%p\d+ )?((?:add|sub|mul|fma|mad|div|sqrt|rcp|rsqrt|ex2|lg2|tanh)\.[\w.:]+);?", re.M)
ROUNDED = {f"{name}.rn.f32" for name in ("add", "sub", "mul", "div", "sqrt")}
TILES = {
    ieee_attention_triton.FORWARD: ieee_attention_triton.FORWARD_TILES,
    ieee_attention_triton.BACKWARD_QUERY: ieee_attention_triton.QUERY_TILES,
    ieee_attention_triton.BACKWARD_KEY: ieee_attention_triton.KEY_TILES,
}
# Fused operations for each exp2, which begins with the only max.NaN: six, and in attention its argument.
FUSED = dict.fromkeys(TILES, 7) | {ieee_samples.SAMPLES: 6}
ROUNDED |= {f"{name}.rn.f32x2" for name in ("add", "sub", "mul")}  # Blackwell: two numbers at once


@functools.cache
def ptx_of(kernel, architecture, **options):
    """The kernel's PTX."""
    types, constants = KERNELS[kernel]
    assert kernel.kernel.arg_names == [*types, *constants]
    tiles = TILES[kernel][128]._asdict() if kernel in TILES else {"warps": 4, "stages": 3}
    warps = {f"num_{name}": tiles[name] for name in ("warps", "stages")}
    return ptx(kernel.kernel, types, constants, architecture, **warps, **options)


def float_operations(kernel, architecture, options):
    ptx = ptx_of(kernel, architecture, **options)
    return {name for name in OPERATION.findall(ptx) if "f" in name.replace("fma", "", 1)}


LONG = {
    ieee_attention_triton.BACKWARD_QUERY,
    ieee_attention_triton.BACKWARD_KEY,
    ieee_draw.RACE,
    ieee_draw.AGAIN,
}  # in ptxas


def kernel_rows(kernels):
    return [pytest.param(kernel, marks=pytest.mark.release) if kernel in LONG else kernel for kernel in kernels]


@pytest.mark.parametrize("architecture", (90, pytest.param(100, marks=pytest.mark.release)))
@pytest.mark.parametrize("kernel", kernel_rows(KERNELS), ids=lambda kernel: kernel.kernel.__name__)
def test_every_operation_rounds_once(kernel, architecture):
    assert kernel.options == UNFUSED
    result = float_operations(kernel, architecture, kernel.options)
    assert result & {"mul.rn.f32", "mul.rn.f32x2"}
    assert result <= (ROUNDED | {"fma.rn.f32", "fma.rn.f32x2"} if kernel in FUSED else ROUNDED)


@pytest.mark.parametrize("kernel", kernel_rows(FUSED), ids=lambda kernel: kernel.kernel.__name__)
def test_what_is_written_as_fused_is_fused_and_nothing_else(kernel):
    ptx = ptx_of(kernel, 90, **kernel.options)
    exponentials = len(re.findall(r"max\.NaN\.f32", ptx))
    assert exponentials
    assert len(re.findall(r"fma\.rn\.f32 ", ptx)) == FUSED[kernel] * exponentials


@pytest.mark.parametrize(
    "kernel", (ieee_norm.BACKWARD, ieee_swiglu.BACKWARD), ids=lambda kernel: kernel.kernel.__name__
)
def test_without_the_option_it_would_not(kernel):
    result = float_operations(kernel, 90, {})
    assert "fma.rn.f32" in result
    assert "mul.f32" in result


@pytest.mark.parametrize(
    "kernel", kernel_rows(kernel for kernel in KERNELS if kernel in TILES), ids=lambda kernel: kernel.kernel.__name__
)
def test_a_hopper_multiplies_attention_in_the_instructions_that_were_recorded(kernel):
    """bf16 products in steps of 16, and no other: neither TF32 nor the pipes of fp32. No atomics."""
    ptx = ptx_of(kernel, 90, **kernel.options)
    results = set(re.findall(r"(?:wgmma\.mma_async|mma)\.sync[\w.]*", ptx))
    assert results
    assert all("k16.f32.bf16.bf16" in result or "k16.row.col.f32.bf16.bf16" in result for result in results), results
    assert not re.search(r"^\s+(?:@!?%p\d+ )?(?:atom|red)\.", ptx, re.M)
