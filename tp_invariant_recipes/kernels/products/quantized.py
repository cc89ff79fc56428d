"""A matrix in FP8 with its scales, as an operand of the products that kernels/products/fp8_sum.py defines."""

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
            raise ValueError(f"{size} of k from {start} cut blocks of {BLOCK}")
        return Quantized(data, self.scale.narrow(1, start // BLOCK, -(-size // BLOCK)), self.blocks)

    def of_rows(self, start: int, size: int) -> "Quantized":
        """Return the rows start … start + size: views. With 128x128 start is a multiple of 128."""
        data = self.data.narrow(0, start, size)
        if self.blocks == "tensor":
            return Quantized(data, self.scale, self.blocks)
        if self.blocks == "1x128":
            return Quantized(data, self.scale.narrow(0, start, size), self.blocks)
        if start % BLOCK:
            raise ValueError(f"{size} rows from {start} cut blocks of {BLOCK}")
        return Quantized(data, self.scale.narrow(0, start // BLOCK, -(-size // BLOCK)), self.blocks)
