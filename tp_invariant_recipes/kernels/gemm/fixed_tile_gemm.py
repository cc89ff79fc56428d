# SPDX-License-Identifier: Apache-2.0
"""Matrix products of one fixed tile: the bits of out[i, j] depend only on a[i, :], b[:, j] and k.

The Triton program of a tile of `out` always runs the same instructions on the same shapes, over k in order. Rows and
columns beyond the edge are zeros that it does not write. So the bits depend neither on m and n nor on the position in
the tile. Triton compiles other binaries for other strides and alignments, which change how bytes reach the arithmetic:
by 16-byte copies or single loads. The arithmetic follows from `tl.dot` on TILES and is the same in all these binaries
(tests/unit/kernels/gemm/test_fixed_tile_product.py reads their instructions).

On a GPU this kernel defines a product of numerics=tree; who changes a bit of it changes numerics/tree_modes.py.

On a CPU no library product promises this. There every element is the sum of k rounded products, added in order by
elementwise operations: slow, and correct with any library and processor. CPU and GPU agree to rounding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# dtype of the inputs -> tile of `out`, step of k, warps, pipeline stages. They are part of the definition of the bits.
TILES = {
    torch.bfloat16: {"TILE_M": 128, "TILE_N": 128, "TILE_K": 64, "num_warps": 8, "num_stages": 3},
    torch.float32: {"TILE_M": 64, "TILE_N": 64, "TILE_K": 32, "num_warps": 4, "num_stages": 2},
}
GROUP = 8  # rows of tiles computed together, so that b's tiles stay in the cache


def fixed_tile_gemm(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """out = a @ b, or out += a @ b: summed in fp32 over k in order, rounded to out's dtype once.

    a:       [m, k] bf16 or fp32; b: [k, n] of a's dtype; either with any strides.
    out:     [m, n] bf16 or fp32, any strides.
    add:     add the whole sum to the values of `out` in fp32, before rounding.
    returns: out.
    """
    if a.dtype not in TILES or a.dtype != b.dtype:
        raise TypeError(f"a GEMM of {a.dtype} and {b.dtype}; both must be bf16, or both fp32")
    if a.shape[1] != b.shape[0] or out.shape != (a.shape[0], b.shape[1]):
        raise ValueError(f"a GEMM of {[*a.shape]} and {[*b.shape]} is not {[*out.shape]}")
    if not a.is_cuda:
        total, term = torch.zeros(2, *out.shape)
        for x, y in zip(a.t().float().contiguous().unsqueeze(2), b.float(), strict=True):
            total += torch.mul(x, y, out=term)
        return out.copy_(total.add_(out) if add else total)
    launch(a, b, out, add)
    return out


def launch(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """Launch the Triton kernel alone; Triton's interpreter can run it on a CPU."""
    (m, k), n = a.shape, b.shape[1]
    tile = TILES[a.dtype]
    grid = (triton.cdiv(m, tile["TILE_M"]) * triton.cdiv(n, tile["TILE_N"]),)
    _product[grid](a, b, out, m, n, k, *a.stride(), *b.stride(), *out.stride(), ADD=add, GROUP=GROUP, **tile)


@triton.jit
def _product(
    a, b, out, m, n, k, a_row, a_column, b_row, b_column, out_row, out_column,
    ADD: tl.constexpr, GROUP: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    of_group = GROUP * tl.cdiv(n, TILE_N)
    start = tl.program_id(0) // of_group * GROUP
    height = tl.minimum(tl.cdiv(m, TILE_M) - start, GROUP)
    place = tl.program_id(0) % of_group
    row = ((start + place % height) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)[:, None]
    column = (place // height * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)[None, :]
    step = tl.full((), TILE_K, tl.int64)
    i = tl.arange(0, TILE_K).to(tl.int64)
    a_at = a + row * a_row + i[None, :] * a_column
    b_at = b + i[:, None] * b_row + column * b_column
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for done in range(0, k, TILE_K):
        in_k = i < k - done
        x = tl.load(a_at, mask=(row < m) & in_k[None, :], other=0.0)
        y = tl.load(b_at, mask=in_k[:, None] & (column < n), other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
        a_at += step * a_column
        b_at += step * b_row
    out_at = out + row * out_row + column * out_column
    inside = (row < m) & (column < n)
    if ADD:
        total += tl.load(out_at, mask=inside).to(tl.float32)
    tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)
