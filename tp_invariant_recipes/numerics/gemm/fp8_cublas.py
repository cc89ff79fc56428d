# SPDX-License-Identifier: Apache-2.0
"""cuBLAS's FP8 products, and the exactness check that tells whether one has the bits of fixed-tile GEMMs on the GPU at
hand.

    torch's `_scaled_mm`     without addition; with blocks, e4m3 by e4m3
    Transformer Engine's     added to an fp32 output, and e5m2 with blocks; a slice of k is copied first

Both compute rows of `out` as cuBLAS's columns, so b is its first operand. numerics/gemm/cublas.py says how exactness
checks are kept; the operands here are those of fp8_probe.py.
"""

from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.kernels.gemm.quantize import BLOCK, E4M3, Quantized
from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.numerics.gemm import cublas
from tp_invariant_recipes.numerics.gemm.operands import like
from tp_invariant_recipes.numerics.gemm.probe import DRAWS

TRIALS = 2  # of each draw
# Also what Transformer Engine says where cuBLAS has no algorithm.
NOT_TAKEN = (*cublas.LAYOUT_NOT_TAKEN, "Unable to find any suitable algorithms")
RECIPES = {"tensor": 0, "1x128": 4, "128x128": 5}  # of torch.nn.functional.ScalingType

# kind of GEMM -> whether cuBLAS had the bits of fixed-tile GEMMs.
_is_exact = cublas.Verdicts("FP8 GEMM")


def matches_definition(a: Quantized, b: Quantized, out: Tensor, add: bool, defined: cublas.Product) -> bool:
    """Whether cuBLAS may compute it. While a CUDA graph is captured: only a kind that was tried before."""
    if not suits(a, b, out, add):
        return False
    return cublas.tried(_is_exact, kind(a, b, out, add), a.data, lambda: agree(launch, defined, a, b, out, add))


def kind(a: Quantized, b: Quantized, out: Tensor, add: bool) -> tuple[Any, ...]:
    """All that decides which kernel computes a GEMM."""
    return (
        *(part for x in (a, b) for part in (x.blocks, *_place(x.data), *_place(x.scale))), *_place(out), add,
        *cublas.settings(),
    )  # fmt: skip


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16


def suits(a: Quantized, b: Quantized, out: Tensor, add: bool) -> bool:
    """Whether one of the two takes the operands: rows of 16 bytes in memory, and no empty dimension."""
    m, n = out.shape
    k = a.data.shape[1]
    rows = all(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in (a.data, b.data, out))
    sizes = m and n and k and k % 16 == 0 and n % 16 == 0 and (a.blocks == "tensor" or (m % 8 == 0 and k % BLOCK == 0))
    if not sizes or not rows or out.stride(1) != 1:
        return False
    if not by_transformer_engine(a, b, add):
        return True
    return out.is_contiguous() and installed("transformer-engine") is not None


def by_transformer_engine(a: Quantized, b: Quantized, add: bool) -> bool:
    """Whether torch does not offer the product."""
    return add or (a.blocks != "tensor" and not a.data.dtype == b.data.dtype == E4M3)


def launch(a: Quantized, b: Quantized, out: Tensor, add: bool) -> None:
    """out = a @ b^T, or out += it, in one launch of cuBLAS, for what `suits`."""
    if by_transformer_engine(a, b, add):
        _transformer_engine(a, b, out, add)
    elif a.blocks == "tensor":
        scales = a.scale.view(()), b.scale.view(())
        torch._scaled_mm(a.data, b.data.t(), *scales, out_dtype=out.dtype, use_fast_accum=False, out=out)
    else:
        a_scale, b_scale = ([_scale(x).t()] for x in (a, b))
        torch._scaled_mm_v2(
            a.data, b.data.t(), a_scale, [RECIPES[a.blocks]], [], b_scale, [RECIPES[b.blocks]], [], None, out.dtype, [],
            False, out=out,
        )  # fmt: skip


def _scale(x: Quantized) -> Tensor:
    """As cuBLAS reads it: [k/128, rows] of 1x128; [rows/128, k/128] of 128x128, with k/128 padded to 4. No gaps."""
    if x.blocks == "1x128":
        return x.scale.t().contiguous()
    missing = -x.scale.shape[1] % 4
    return torch.nn.functional.pad(x.scale, (0, missing)) if missing else x.scale.contiguous()


def _transformer_engine(a: Quantized, b: Quantized, out: Tensor, add: bool) -> None:
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    general_gemm(
        _storage(b), _storage(a), out_dtype=out.dtype, layout="TN", out=out, accumulate=add, use_split_accumulator=True
    )


def _storage(x: Quantized) -> Any:
    """Return Transformer Engine's tensor of the same memory."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    dtype = tex.DType.kFloat8E4M3 if x.data.dtype == E4M3 else tex.DType.kFloat8E5M2
    data = x.data.contiguous().view(torch.uint8)
    if x.blocks == "tensor":
        return Float8TensorStorage(data=data, fp8_scale_inv=x.scale.view(1), fp8_dtype=dtype)
    return Float8BlockwiseQTensorStorage(data, _scale(x), None, None, dtype, None, x.blocks == "128x128")


def agree(
    first: cublas.Product, defined: cublas.Product, a: Quantized, b: Quantized, out: Tensor, add: bool
) -> bool:  # fmt: skip
    """Whether two GEMMs have the same bits on operands that lie in memory as these do; `out` stays.

    False, too, where cuBLAS does not take the operands' layout.
    """
    x, y = (Quantized(like(operand.data, 16), like(operand.scale, 16), operand.blocks) for operand in (a, b))
    return cublas.agree_on(first, defined, x, y, out, add, DRAWS * TRIALS, NOT_TAKEN)
