"""A matrix becomes FP8: largest magnitude, scale and cast, as Transformer Engine 2.20 computes them.

    amax    the largest magnitude of what shares a scale; a NaN is none
    scale   largest(dtype) / amax, one IEEE division in fp32; where that overflows, the largest number of fp32 (of a
            tensor) or of the matrix's dtype (of a block); of blocks its significand is cut, so it is a power of two;
            1 where amax is 0 or an infinity
    data    x * scale in fp32, at most the largest number of the type in magnitude, rounded to nearest even

`Quantized.scale` is 1 / scale, one IEEE division. Transformer Engine has the first three in C++
(`compute_scale_from_amax` of common/recipe/recipe_common.cuh); its recipes Float8CurrentScaling and Float8BlockScaling
set neither an epsilon nor, for a tensor, powers of two. tests/gpu/kernels/test_quantize_gpu.py compares every bit.
"""

import torch
from torch import Tensor

from tp_invariant_recipes.kernels.products.quantized import BLOCK, E4M3, E5M2, Quantized

LARGEST = {E4M3: 448.0, E5M2: 57344.0}
FP32_LARGEST = torch.finfo(torch.float32).max
EXPONENT_BITS = -(2**23)  # as int32: the sign and the exponent of an fp32 number


def largest_magnitude(x: Tensor) -> Tensor:
    """[] fp32: amax of a whole matrix, bf16 or fp32."""
    return _magnitudes(x).amax().float()


def scales(amax: Tensor, dtype: torch.dtype, *, overflow: float = FP32_LARGEST, power_of_two: bool = False) -> Tensor:
    """Return what numbers are multiplied by before the cast, of amax's shape in fp32.

    overflow: the scale where the quotient is beyond fp32.
    """
    scale = torch.div(torch.full_like(amax, LARGEST[dtype]), amax)
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, overflow), scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    return torch.where((amax == 0) | ~torch.isfinite(amax), torch.ones_like(scale), scale)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale in FP8; scale: fp32, broadcast to x. returns: x's shape, without gaps."""
    largest = LARGEST[dtype]
    return (x.float() * scale).clamp_(-largest, largest).to(dtype).contiguous()


def of_tensor(x: Tensor, amax: Tensor, dtype: torch.dtype) -> Quantized:
    """x [rows, k] with one scale. amax: [] fp32, of all that shares the scale, which may be more than x."""
    scale = scales(amax, dtype)
    return Quantized(cast(x, scale, dtype), _inverse(scale))


def of_groups(x: Tensor, counts: Tensor, dtype: torch.dtype) -> Quantized:
    """x [rows, k] of consecutive groups, with a scale for each. counts: [groups] int64, rows of each.

    returns: scales [groups]; of a group without rows 1.
    """
    group = torch.repeat_interleave(torch.arange(len(counts), device=x.device), counts, output_size=len(x))
    amax = torch.zeros(len(counts), dtype=torch.float32, device=x.device)
    amax.scatter_reduce_(0, group, _magnitudes(x).amax(1).float(), "amax")
    scale = scales(amax, dtype)
    return Quantized(cast(x, scale[group].unsqueeze(1), dtype), _inverse(scale))


def along_rows(x: Tensor, dtype: torch.dtype) -> Quantized:
    """x [rows, k] with a scale for every 128 of k in a row; k is a multiple of 128."""
    blocks = x.unflatten(1, (-1, BLOCK))
    scale = _block_scales(_magnitudes(blocks).amax(2), x.dtype, dtype)
    return Quantized(cast(blocks, scale.unsqueeze(2), dtype).flatten(1), _inverse(scale), "1x128")


def of_blocks(x: Tensor, dtype: torch.dtype) -> Quantized:
    """x [rows, k] with a scale for every block of 128 by 128; both are multiples of 128."""
    blocks = x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = _block_scales(_magnitudes(blocks).amax((1, 3)), x.dtype, dtype)
    data = cast(blocks, scale[:, None, :, None], dtype)
    return Quantized(data.view(x.shape), _inverse(scale), "128x128")


def transposed(q: Quantized) -> Quantized:
    """Return the matrix [k, rows], with the same numbers. "tensor" or "128x128"."""
    data = q.data.view(torch.uint8).t().contiguous().view(q.data.dtype)
    return Quantized(data, q.scale if q.blocks == "tensor" else q.scale.t(), q.blocks)


def _magnitudes(x: Tensor) -> Tensor:
    return x.abs().nan_to_num(nan=0.0, posinf=float("inf"))


def _block_scales(amax: Tensor, source: torch.dtype, dtype: torch.dtype) -> Tensor:
    return scales(amax.float(), dtype, overflow=torch.finfo(source).max, power_of_two=True)


def _inverse(scale: Tensor) -> Tensor:
    return torch.div(torch.ones_like(scale), scale)
