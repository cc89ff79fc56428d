# SPDX-License-Identifier: Apache-2.0
"""kernels/gemm/mxfp8.py in plain torch."""

import torch
from torch import Tensor

from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups
from tp_invariant_recipes.kernels.gemm.mxfp8 import BLOCK, TYPES, Pair

ABOVE = 96  # a significand of more than 1 + 96/128 is above that of the largest number, 1.75, in both
INFINITY = 0x7F80  # bits of bf16


def by_torch(x: Tensor, out: Pair, dtype: torch.dtype, rows: bool, columns: bool, groups: Groups | None) -> None:
    """Fill `out` as the kernels do."""
    if rows:
        out[0].copy_(_rounded(x.unflatten(1, (-1, BLOCK)), 2, dtype).flatten(1))
    if columns and groups is None:
        out[1].copy_(_rounded(x.unflatten(0, (-1, BLOCK)), 1, dtype).flatten(0, 1))
    elif columns and groups is not None:
        group, starts = groups.tiles(BLOCK)
        there = starts[:, None] + torch.arange(BLOCK) < groups.ends[group][:, None]
        blocks = x.new_zeros(*there.shape, x.shape[1])  # zeros change no scale
        blocks[there] = x
        out[1].copy_(_rounded(blocks, 1, dtype)[there])


def _rounded(x: Tensor, along: int, dtype: torch.dtype) -> Tensor:
    """All of a dimension shares a scale."""
    bits = x.view(torch.int16).int() & 0x7FFF
    amax = torch.where(bits > INFINITY, 0, bits).amax(along, keepdim=True)
    code = (amax.bitwise_right_shift(7) - TYPES[dtype][0] + (amax & 127).gt(ABOVE)).clamp_(min=0)
    code = torch.where(amax == INFINITY, 254, code)
    power = code.double() - 127
    number = (x.float() * torch.exp2(-power).float()).nan_to_num(0, 0, 0).to(dtype).float() * torch.exp2(power).float()
    return torch.where(bits >= INFINITY, x, number.to(x.dtype))
