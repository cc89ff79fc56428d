# SPDX-License-Identifier: Apache-2.0
"""GEMMs of FP8 operands in Triton, by one fixed tile: of two matrices, and of experts' rows.

As in kernels/gemm/fixed_tile_gemm.py a program computes one tile of `out`, always with the same instructions
over k in order, so a row's and a column's bits depend on nothing beside them. On Hopper `tl.dot` is four instructions
of 32 for the 128 of k of a step; it starts with zeros, or with `max_num_imprecise_acc` adds its sum to what it is given
in fp32.

A product and a sum must not become an FMA, and the kernels are launched so (UNFUSED). An FMA is written as `tl.fma`.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups, all_aligned, offsets_of, on_device
from tp_invariant_recipes.kernels.gemm.quantize import BLOCK, E4M3, E5M2, Quantized
from tp_invariant_recipes.kernels.launch import Kernel

STEP = 32  # products added at once
KEPT_BITS = 13  # bits kept below the largest exponent, and below the leading one of an accumulator
PROMOTED = 128  # products of an accumulator, before it enters `main`
LEAST = {E4M3: -6, E5M2: -14}  # exponent of the smallest normal number, and of subnormal ones


def kind(a: Quantized, b: Quantized) -> str:
    """Return the blocks of b, which name the products: "tensor", "1x128" or "128x128".

    raises TypeError: scales or types that no product is defined for; ValueError: k differs.
    """
    pair = a.blocks, b.blocks
    if pair not in (("tensor", "tensor"), ("1x128", "1x128"), ("1x128", "128x128")):
        raise TypeError(f"FP8 scales of {pair[0]} by {pair[1]}; tensor by tensor, 1x128 by 1x128, 1x128 by 128x128")
    if a.data.dtype == b.data.dtype == E5M2:
        raise TypeError("a GEMM of e5m2 and e5m2, which Hopper's libraries do not compute; one must be e4m3")
    if a.data.shape[1] != b.data.shape[1]:
        raise ValueError(f"a GEMM of {[*a.data.shape]} and {[*b.data.shape]}^T")
    return b.blocks


UNFUSED = {"enable_fp_fusion": False}
TILE, WARPS, STAGES = 128, 8, 3  # rows and columns of a tile; a step of k is BLOCK
GROUP = 8  # rows of tiles computed together, so that b's tiles stay in the cache
KINDS = {"tensor": 0, "1x128": 1, "128x128": 2}  # b's blocks -> KIND of the kernels


def gemm(a: Quantized, b: Quantized, out: Tensor, add: bool) -> None:
    """out = a @ b^T, or out += it; any operands of `kind`.

    a, b: [m, k] and [n, k] on a GPU; out: [m, n] fp32 or bf16, any strides.
    """
    code = KINDS[kind(a, b)]
    m, n = out.shape
    if m and n:
        grid = (triton.cdiv(m, TILE) * triton.cdiv(n, TILE),)
        _product[grid](
            a.data, b.data, out, a.scale, b.scale, m, n, a.data.shape[1], a.data.stride(0), b.data.stride(0),
            *_strides(a), *_strides(b), *out.stride(), KIND=code, ADD=add, GROUP=GROUP, TILE=TILE, BLOCK=BLOCK,
            **_options(),
        )  # fmt: skip


def _options() -> dict[str, Any]:
    plain = not isinstance(_product, triton.JITFunction)  # Triton's interpreter
    return {} if plain else {"num_warps": WARPS, "num_stages": STAGES, **UNFUSED}


def _strides(x: Quantized) -> tuple[int, int]:
    return (x.scale.stride(0), x.scale.stride(1)) if x.blocks != "tensor" else (0, 0)


def grouped_gemm(x: Quantized, weights: Sequence[Quantized], out: Tensor, groups: Groups) -> None:
    """out[rows of g] = x[rows of g] @ weights[g]^T: numerics/gemm/fp8.py, on a GPU.

    x.data and every weight's data: contiguous, and scales of blocks of one stride.
    """
    group, first = groups.tiles(TILE)
    if not len(group):
        return
    code = KINDS[kind(x, weights[0])]
    data, scales = [weight.data for weight in weights], [weight.scale for weight in weights]
    k, n = x.data.shape[1], out.shape[1]
    by_group = int(x.blocks == "tensor" and x.scale.numel() > 1)
    tensors = (
        x.data, data[0], out, x.scale, scales[0], offsets_of(data), offsets_of(scales), group, first, groups.ends
    )  # fmt: skip
    constants = (n, k, *_strides(weights[0]), by_group, code, all_aligned(data), TILE, BLOCK)
    PRODUCT.launch((len(group) * triton.cdiv(n, TILE), 1), tensors, _strides(x), constants, WARPS, STAGES)


def grouped_weight_gradient(
    dy: Quantized, x: Quantized, outs: Sequence[Tensor], groups: Groups, chain: Sequence[int] = (0,)
) -> None:
    """outs[i] += dy[:, rows of g] @ x[:, rows of g]^T, group by group: numerics/gemm/fp8.py, on a GPU.

    dy.data, x.data: rows of any stride; the kernel copies 16 bytes at once where it and the groups are multiples of 16.
    """
    code = KINDS[kind(dy, x)]
    n, k = len(dy.data), len(x.data)
    rows = dy.data.stride(0), x.data.stride(0)
    even = all(size % 16 == 0 for size in (*rows, *groups.sizes)) and all_aligned([dy.data, x.data])
    order = on_device(chain, dy.data.device)
    tensors = (dy.data, x.data, outs[0], dy.scale, x.scale, offsets_of(outs), groups.ends, order)
    by_group = tuple(int(operand.blocks == "tensor" and operand.scale.numel() > 1) for operand in (dy, x))
    constants = (n, k, len(chain), *by_group, code, even, all_aligned(outs), TILE, BLOCK)
    grid = (triton.cdiv(n, TILE) * triton.cdiv(k, TILE), len(outs))
    WEIGHT_GRADIENT.launch(grid, tensors, (*rows, *_strides(dy), *_strides(x)), constants, WARPS, STAGES)


@triton.jit
def _sum(
    a, b, rows, columns, sa, sb, sa_k, sb_k, k, KIND: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute `main` of a tile, before the scale of tensors.

    a, b: pointers to the first of k of each row [TILE, 1] and column [1, TILE]; rows, columns: which exist.
    sa, sb: pointers to the scales of the first block, [TILE, 1], and [1, TILE] or for 128x128 one; sa_k, sb_k: strides.
    """
    i = tl.arange(0, BLOCK)
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    a_at = a + i[None, :]
    b_at = b + i[:, None]
    for done in range(0, k, BLOCK):
        in_k = i < k - done
        x = tl.load(a_at, mask=rows & in_k[None, :], other=0.0)
        y = tl.load(b_at, mask=in_k[:, None] & columns, other=0.0)
        if KIND == 0:
            total = tl.dot(x, y, total, max_num_imprecise_acc=BLOCK)
        else:
            p = tl.dot(x, y)
            s = tl.load(sa, mask=rows, other=0.0)
            if KIND == 1:
                t = tl.load(sb, mask=columns, other=0.0)
                total = tl.fma(p * s, tl.broadcast_to(t, (TILE, TILE)), total)
            else:
                t = tl.load(sb)
                total = tl.fma(p, tl.broadcast_to(s * t, (TILE, TILE)), total)
            sa += sa_k
            sb += sb_k
        a_at += BLOCK
        b_at += BLOCK
    return total


@triton.jit
def _product(
    a, b, out, sa, sb, m, n, k, a_row, b_row, sa_row, sa_k, sb_row, sb_k, out_row, out_column,
    KIND: tl.constexpr, ADD: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    of_group = GROUP * tl.cdiv(n, TILE)
    start = tl.program_id(0) // of_group * GROUP
    height = tl.minimum(tl.cdiv(m, TILE) - start, GROUP)
    place = tl.program_id(0) % of_group
    tile_n = place // height
    row = ((start + place % height) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = (tile_n * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    rows, columns = row < m, column < n
    sb_at = sb + (tile_n if KIND == 2 else column) * sb_row
    total = _sum(
        a + row * a_row, b + column * b_row, rows, columns, sa + row * sa_row, sb_at, sa_k, sb_k, k, KIND, TILE, BLOCK
    )
    if KIND == 0:
        total *= tl.load(sa) * tl.load(sb)
    out_at = out + row * out_row + column * out_column
    if ADD:
        total += tl.load(out_at, mask=rows & columns)
    tl.store(out_at, total.to(out.dtype.element_ty), mask=rows & columns)


@triton.jit(do_not_specialize=["sx_row", "sx_k"])
def _grouped_product(
    x, weights, out, sx, sw, offsets, scale_offsets, group, first, ends, sx_row, sx_k,
    N: tl.constexpr, K: tl.constexpr, SW_ROW: tl.constexpr, SW_K: tl.constexpr, SX_GROUP: tl.constexpr,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (N + TILE - 1) // TILE
    tile = tl.program_id(0) // across
    tile_n = tl.program_id(0) % across
    g = tl.load(group + tile)
    offset = tl.load(offsets + g)
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    row = tl.load(first + tile) + tl.arange(0, TILE).to(tl.int64)[:, None]
    column = (tile_n * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    rows, columns = row < tl.load(ends + g), column < N
    sw_at = sw + tl.load(scale_offsets + g)
    sw_tile = sw_at + (tile_n if KIND == 2 else column) * SW_ROW
    total = _sum(
        x + row * K, weights + offset + column * K, rows, columns, sx + row * sx_row, sw_tile, sx_k, SW_K, K,
        KIND, TILE, BLOCK,
    )  # fmt: skip
    if KIND == 0:
        total *= tl.load(sx + g * SX_GROUP) * tl.load(sw_at)
    tl.store(out + row * N + column, total.to(out.dtype.element_ty), mask=rows & columns)


@triton.jit
def _of_group(
    dy, x, sdy, sx, ends, g, row, column, dy_row, x_row, sdy_row, sdy_k, sx_row, sx_k,
    N: tl.constexpr, K: tl.constexpr, SDY_GROUP: tl.constexpr, SX_GROUP: tl.constexpr, KIND: tl.constexpr,
    EVEN: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return a tile of dy @ x^T, of the rows of group g."""
    end = tl.load(ends + g)
    begin = tl.where(g > 0, tl.load(ends + tl.maximum(g, 1) - 1), 0)
    if EVEN:
        begin, end = tl.multiple_of(begin, 16), tl.multiple_of(end, 16)
    block = begin // BLOCK
    total = _sum(
        dy + row * dy_row + begin, x + column * x_row + begin, row < N, column < K,
        sdy + row * sdy_row + block * sdy_k, sx + column * sx_row + block * sx_k, sdy_k, sx_k, end - begin,
        KIND, TILE, BLOCK,
    )  # fmt: skip
    if KIND == 0:
        total *= tl.load(sdy + g * SDY_GROUP) * tl.load(sx + g * SX_GROUP)
    return total


@triton.jit(do_not_specialize=["dy_row", "x_row", "sdy_row", "sdy_k", "sx_row", "sx_k"])
def _grouped_weight_gradient(
    dy, x, outs, sdy, sx, offsets, ends, chain, dy_row, x_row, sdy_row, sdy_k, sx_row, sx_k,
    N: tl.constexpr, K: tl.constexpr, CHAIN: tl.constexpr, SDY_GROUP: tl.constexpr, SX_GROUP: tl.constexpr,
    KIND: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (K + TILE - 1) // TILE
    offset = tl.load(offsets + tl.program_id(1))
    if EVEN:
        dy_row, x_row = tl.multiple_of(dy_row, 16), tl.multiple_of(x_row, 16)
    if ALIGNED:
        offset = tl.multiple_of(offset, 4)
    row = (tl.program_id(0) // across * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = (tl.program_id(0) % across * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    inside = (row < N) & (column < K)
    out_at = outs + offset + row * K + column
    if CHAIN == 1:  # the output takes no registers before it is needed
        out = _of_group(
            dy, x, sdy, sx, ends, tl.program_id(1), row, column, dy_row, x_row, sdy_row, sdy_k, sx_row, sx_k,
            N, K, SDY_GROUP, SX_GROUP, KIND, EVEN, TILE, BLOCK,
        )  # fmt: skip
        out += tl.load(out_at, mask=inside)
    else:
        out = tl.load(out_at, mask=inside)
        for link in range(CHAIN):
            out += _of_group(
                dy, x, sdy, sx, ends, tl.program_id(1) * CHAIN + tl.load(chain + link), row, column, dy_row, x_row,
                sdy_row, sdy_k, sx_row, sx_k, N, K, SDY_GROUP, SX_GROUP, KIND, EVEN, TILE, BLOCK,
            )  # fmt: skip
    tl.store(out_at, out, mask=inside)


PRODUCT = Kernel(_grouped_product, **UNFUSED)
WEIGHT_GRADIENT = Kernel(_grouped_weight_gradient, **UNFUSED)
