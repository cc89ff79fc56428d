# SPDX-License-Identifier: Apache-2.0
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

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 128  # of k, and of rows, that share a scale

Blocks = Literal["tensor", "1x128", "128x128"]


@dataclass(frozen=True)
class Quantized:
    """The matrix data * scale.

    data:   [rows, k] float8_e4m3fn or float8_e5m2; k is the dimension that a product sums, and contiguous.
    scale:  fp32, what a number of `data` is multiplied by (Transformer Engine's `scale_inv`), with any strides:
            [] or [1] for "tensor"; [rows, ceil(k/128)] for "1x128"; [ceil(rows/128), ceil(k/128)] for "128x128".
            A grouped product also takes [groups] for "tensor", one for the rows of each group.
    blocks: what shares a scale.
    raises TypeError, ValueError: other dtypes, strides or shapes.
    """

    data: Tensor
    scale: Tensor
    blocks: Blocks = "tensor"

    def __post_init__(self) -> None:
        if self.data.dtype not in (E4M3, E5M2) or self.scale.dtype != torch.float32:
            raise TypeError(f"FP8 numbers of {self.data.dtype} with scales of {self.scale.dtype}; e4m3 or e5m2, fp32")
        rows, k = self.data.shape
        if self.data.stride(1) != 1 and k > 1 and rows:
            raise ValueError(f"the summed dimension of {[rows, k]} is not contiguous: strides {self.data.stride()}")
        expected = self._shape_of_scale()
        if expected is not None and self.scale.shape != expected:
            raise ValueError(f"scales {[*self.scale.shape]} of {self.blocks} for {[rows, k]}; {[*expected]}")

    def _shape_of_scale(self) -> tuple[int, int] | None:
        """None: "tensor", whose scales a product counts."""
        rows, k = (-(-size // BLOCK) for size in self.data.shape)
        return {"1x128": (self.data.shape[0], k), "128x128": (rows, k)}.get(self.blocks)

    def along_k(self, start: int, size: int) -> "Quantized":
        """Return the columns start … start + size of k: views.

        With blocks both are multiples of 128, or size ends k.
        """
        data = self.data.narrow(1, start, size)
        if self.blocks == "tensor":
            return Quantized(data, self.scale, self.blocks)
        if start % BLOCK or (size % BLOCK and start + size < self.data.shape[1]):
            raise ValueError(f"{size} of k from {start} split blocks of {BLOCK}")
        return Quantized(data, self.scale.narrow(1, start // BLOCK, -(-size // BLOCK)), self.blocks)

    def of_rows(self, start: int, size: int) -> "Quantized":
        """Return the rows start … start + size: views. With 128x128 start is a multiple of 128."""
        data = self.data.narrow(0, start, size)
        if self.blocks == "tensor":
            return Quantized(data, self.scale, self.blocks)
        if self.blocks == "1x128":
            return Quantized(data, self.scale.narrow(0, start, size), self.blocks)
        if start % BLOCK:
            raise ValueError(f"{size} rows from {start} split blocks of {BLOCK}")
        return Quantized(data, self.scale.narrow(0, start // BLOCK, -(-size // BLOCK)), self.blocks)


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
