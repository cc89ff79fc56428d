"""Rows less their mean: what LayerNorm does before an RMSNorm, and what its backward pass does last.

A row's bits depend only on that row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.folding_sum import folding_sum
from tp_invariant_recipes.kernels.launch import Kernel

TILE = 4096  # elements of x that a program holds


def centred_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x - mean(x) over the last dimension, in fp32, rounded once. x: [rows, d]; returns: [rows, d] of `dtype`."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    return _centred_triton(x, out) if x.is_cuda else _centred_torch(x, out)


def _centred_torch(x: Tensor, out: Tensor) -> Tensor:
    mean = folding_sum(x.float().clone(), -1) * (1.0 / x.shape[1])
    return out.copy_(x.float() - mean.unsqueeze(1))


def _centred_triton(x: Tensor, out: Tensor) -> Tensor:
    rows, width = x.shape
    columns = triton.next_power_of_2(width)
    tile = max(1, TILE // columns)
    x = x.clone() if x.data_ptr() % 16 else x  # another alignment could be another order of additions
    constants = width, columns, tile
    KERNEL.launch((triton.cdiv(rows, tile), 1), (x, out), (rows,), constants, 8 if columns >= TILE else 4)
    return out


@triton.jit(do_not_specialize=["rows"])
def _centred_rows(x, out, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = (row * WIDTH)[:, None] + column[None, :]
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(wide, 1) * (1.0 / WIDTH)
    tl.store(out + at, (wide - mean[:, None]).to(out.dtype.element_ty), mask=inside)


KERNEL = Kernel(_centred_rows)
