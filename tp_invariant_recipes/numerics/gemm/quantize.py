# SPDX-License-Identifier: Apache-2.0
"""Operands of FP8 products, by Transformer Engine's kernels on a GPU that has them, else as quantize.py states.

Both have the same bits (tests/gpu/kernels/test_quantize_gpu.py). Nothing here waits for the GPU: amax, its maximum over
ranks and scales stay on the device.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.kernels.gemm import quantize
from tp_invariant_recipes.kernels.gemm.quantize import BLOCK, E4M3, E5M2, Quantized
from tp_invariant_recipes.machine.versions import installed

SIDES = 16  # Transformer Engine's layers quantize matrices with sides in such steps

Pair = tuple[Quantized, Quantized]  # of a matrix [rows, k]: to be summed over k, and transposed, [k, rows], over rows


def of_tensor(x: Tensor, dtype: torch.dtype, group: Any) -> Quantized:
    """x with the scale of a tensor of which each rank of the group has a part.

    x: [rows, k], bf16. group: of torch.distributed; None: x is the whole tensor. A maximum has no order.
    """
    if _by_library(x):
        made = _tensor_quantizer(dtype, group, False).quantize_impl(x.contiguous())
        return Quantized(made._data.view(dtype), made._scale_inv)
    amax = quantize.largest_magnitude(x)
    if group is not None:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    return quantize.of_tensor(x, amax, dtype)


def of_tensor_both_ways(x: Tensor, dtype: torch.dtype, group: Any) -> Pair:
    """`of_tensor`, and the same numbers transposed: in one launch on a GPU."""
    if _by_library(x):
        return _pair(_tensor_quantizer(dtype, group, True).quantize_impl(x.contiguous()), dtype)
    q = of_tensor(x, dtype, group)
    return q, quantize.transposed(q)


def along_rows(x: Tensor, dtype: torch.dtype) -> Quantized:
    """x [rows, k] with a scale for every 128 of k; k is a multiple of 128."""
    return _along(x, dtype, True, False)[0] if _by_library(x) else quantize.along_rows(x, dtype)


def along_columns(x: Tensor, dtype: torch.dtype) -> Quantized:
    """x^T [k, rows] with a scale for every 128 rows of x; their number is a multiple of 128."""
    return _along(x, dtype, False, True)[1] if _by_library(x) else quantize.along_rows(x.t(), dtype)


def along_both(x: Tensor, dtype: torch.dtype) -> Pair:
    """`along_rows` and `along_columns`: in one launch on a GPU."""
    if not _by_library(x):
        return quantize.along_rows(x, dtype), quantize.along_rows(x.t(), dtype)
    rows, columns = _along(x, dtype, True, True)
    return rows, columns


def of_blocks_both_ways(x: Tensor) -> Pair:
    """x [rows, k] in e4m3 with a scale for every block of 128 by 128, and the same numbers transposed."""
    if not _by_library(x):
        q = quantize.of_blocks(x, E4M3)
        return q, quantize.transposed(q)
    return _pair_of_blocks(_block_quantizer(E4M3, 2, True, True).quantize_impl(x.contiguous()))


def of_weight(x: Tensor, blockwise: bool, group: Any) -> tuple[Pair, Callable[[Tensor], object]]:
    """`of_blocks_both_ways` or `of_tensor_both_ways` in e4m3, and what quantizes another matrix into their memory."""
    if not _by_library(x):

        def form(x: Tensor) -> Pair:
            return of_blocks_both_ways(x) if blockwise else of_tensor_both_ways(x, E4M3, group)

        pair = form(x)
        return pair, lambda other: _copy(form(other), pair)
    quantizer = _block_quantizer(E4M3, 2, True, True) if blockwise else _tensor_quantizer(E4M3, group, True)
    made = quantizer.quantize_impl(x.contiguous())
    pair = _pair_of_blocks(made) if blockwise else _pair(made, E4M3)
    return pair, lambda other: _library().quantize(other.contiguous(), quantizer, made, None)


def transposed(q: Quantized) -> Quantized:
    """[k, rows], with the same numbers. "tensor"."""
    if not q.data.is_cuda or not _has_library():
        return quantize.transposed(q)
    data = _library().fp8_transpose(q.data.view(torch.uint8).contiguous(), _names()[q.data.dtype], out=None)
    return Quantized(data.view(q.data.dtype), q.scale)


def _copy(source: Pair, to: Pair) -> None:
    for own, other in zip(source, to, strict=True):
        other.data.view(torch.uint8).copy_(own.data.view(torch.uint8))
        other.scale.copy_(own.scale)


def _pair(made: Any, dtype: torch.dtype) -> Pair:
    return Quantized(made._data.view(dtype), made._scale_inv), Quantized(made._transpose.view(dtype), made._scale_inv)


def _pair_of_blocks(made: Any) -> Pair:
    data = made._rowwise_data, made._columnwise_data
    scales = made._rowwise_scale_inv, made._columnwise_scale_inv  # padded
    rows, columns = (
        Quantized(block.view(E4M3), scale[:, : -(-block.shape[1] // BLOCK)], "128x128")
        for block, scale in zip(data, scales, strict=True)
    )
    return rows, columns


def _along(x: Tensor, dtype: torch.dtype, rowwise: bool, columnwise: bool) -> list[Any]:
    made = _block_quantizer(dtype, 1, rowwise, columnwise).quantize_impl(x.contiguous())
    operands = (
        (made._rowwise_data, made._rowwise_scale_inv, x.shape[0]),
        (made._columnwise_data, made._columnwise_scale_inv, x.shape[1]),
    )
    return [
        None if data is None else Quantized(data.view(dtype), scale[:, :size].t(), "1x128")
        for data, scale, size in operands
    ]


def _by_library(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16 and not any(size % SIDES for size in x.shape) and _has_library()


@cache
def _has_library() -> bool:
    return installed("transformer-engine") is not None


@cache
def _library() -> Any:
    """Return Transformer Engine's compiled module, which Python finds once the package has been imported."""
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch

    return transformer_engine_torch


@cache
def _names() -> dict[torch.dtype, Any]:
    dtypes = _library().DType  # all versions take these; transformer_engine.pytorch.DType came later than 2.12
    return {E4M3: dtypes.kFloat8E4M3, E5M2: dtypes.kFloat8E5M2}


# `quantize_impl` is what a quantizer calls; around it Transformer Engine forgets the group after the first use.
@cache
def _tensor_quantizer(dtype: torch.dtype, group: Any, columnwise: bool) -> Any:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    reduced = {} if group is None else {"with_amax_reduction": True, "amax_reduction_group": group}
    made = Float8CurrentScalingQuantizer(_names()[dtype], torch.device("cuda"), columnwise=columnwise, **reduced)
    made.internal = True
    return made


@cache
def _block_quantizer(dtype: torch.dtype, dim: int, rowwise: bool, columnwise: bool) -> Any:
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    made = Float8BlockQuantizer(_names()[dtype], rowwise=rowwise, columnwise=columnwise, block_scaling_dim=dim)
    made.internal = True
    return made
