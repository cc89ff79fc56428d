# SPDX-License-Identifier: Apache-2.0
"""A bf16 matrix rounded to MXFP8: a bf16 matrix of the numbers that MXFP8's codes and scales stand for.

    amax    the largest magnitude of 32 neighbours; a NaN is none
    scale   the least power of two, 2^-127 … 2^127, that is not below amax / largest(type); 2^127 where amax is infinite
    number  x / scale rounded to nearest even in e4m3 (or e5m2), subnormal numbers too, times scale

An infinity and a NaN stay. So do all that Transformer Engine's MXFP8Quantizer computes on Blackwell from bf16
(common/cast/mxfp8 and common/util/ptx.cuh: `cvt.rp.satfinite.ue8m0` of amax · 1/448 in fp32, which is exact in this,
and `cvt.rn.satfinite`), and the OCP Microscaling specification, but for the ends: Transformer Engine makes the largest
number of an infinity, and some of its versions make zeros where amax is below 2^-118.

Why bf16 is enough: a number of e4m3 has 4 significant bits and one of e5m2 has 3. What is finer than bf16's smallest
number, 2^-133, cannot come from bf16. What rounds to 2^128 (x ≥ 2^128 - 2^123 in e4m3) is infinite in bf16.

Blocks lie along k for sums over k, and along rows for sums over rows. The Triton kernel reads a matrix once for both,
and has the bits of tests/definitions/mxfp8.py, as kernels/cpu/fp8_cpu.py does on a CPU.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups, all_aligned, offsets_of
from tp_invariant_recipes.kernels.gemm.quantize import E4M3, E5M2
from tp_invariant_recipes.kernels.launch import Kernel

BLOCK = 32
WIDTH = 128  # of k, of a program of the kernel
VECTOR = 8  # numbers of bf16 in 16 bytes
# type -> what is taken from amax's exponent field, and from that of 1, for the exponents of the scale and of the
# smallest normal number; its bits of the significand. One of more than 1 + 96/128 is above that of the largest number.
TYPES = {E4M3: (8, 6, 3), E5M2: (15, 14, 2)}

Pair = tuple[Tensor, Tensor]


def along_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded in blocks of 32 along k. x: [rows, k] bf16, k a multiple of 32. dtype: of the codes."""
    return sides(x, dtype, True, False)[0]


def along_columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded in blocks of 32 along rows. x: [rows, k] bf16, both multiples of 32."""
    return sides(x, dtype, False, True)[1]


def of_weights(weights: Sequence[Tensor], *, rows: bool) -> list[Tensor]:
    """Weights rounded to e4m3 along their k, or along their rows; in one launch on a GPU.

    weights: of one shape, contiguous, their rows and k multiples of 32, anywhere in memory.
    """
    if weights[0].is_cuda:
        return [*_in_single_launch(weights, rows)]
    return [(along_rows if rows else along_columns)(weight, E4M3) for weight in weights]


def sides(x: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = True, groups: Groups | None = None) -> Pair:
    """`along_rows` and `along_columns`, those that are asked for, in one launch on a GPU; x itself for another.

    groups: of rows, whose number then need not be a multiple of 32: along rows blocks begin anew with each group, and
            its last one may be shorter.
    """
    _check(x, columns and groups is None)
    x = x.contiguous()
    out = torch.empty_like(x) if rows else x, torch.empty_like(x) if columns else x
    if x.numel():
        (_by_triton if x.is_cuda else _by_numba)(x, out, dtype, rows, columns, groups)
    return out


def _check(x: Tensor, rows: bool) -> None:
    """Raise unless x is bf16 and blocks divide k, and the rows too if asked for."""
    if x.dtype != torch.bfloat16:
        raise TypeError(f"MXFP8 of {x.dtype}; bf16")
    if x.shape[1] % BLOCK or (rows and len(x) % BLOCK):
        raise ValueError(f"blocks of {BLOCK} do not divide {[*x.shape]}")


def _by_numba(x: Tensor, out: Pair, dtype: torch.dtype, rows: bool, columns: bool, groups: Groups | None) -> None:
    from tp_invariant_recipes.kernels.cpu import fp8_cpu  # loads numba

    bits, *into = (tensor.detach().view(torch.int16).numpy() for tensor in (x, *out))
    if rows:
        fp8_cpu.round_rows(bits, into[0], TYPES[dtype])
    if columns:
        ends = [len(x)] if groups is None else [*accumulate(groups.sizes)]
        borders = [(at, min(at + BLOCK, end)) for start, end in pairwise([0, *ends]) for at in range(start, end, BLOCK)]
        fp8_cpu.round_columns(bits, into[1], TYPES[dtype], np.array(borders))


def _by_triton(x: Tensor, out: Pair, dtype: torch.dtype, rows: bool, columns: bool, groups: Groups | None) -> None:
    count, k = x.shape
    if groups is None:
        starts = ends = x  # not read
        blocks = triton.cdiv(count, BLOCK)
    else:
        group, starts = groups.tiles(BLOCK)
        ends, blocks = groups.ends[group], len(group)
    # Blocks along y are of k, since tokens may be more than CUDA starts there.
    KERNEL.launch(
        (blocks, triton.cdiv(k, WIDTH)), (x, *out, starts, ends), (count, k // BLOCK),
        (groups is not None, 0, rows, columns, *TYPES[dtype], WIDTH // BLOCK),
    )  # fmt: skip


def _in_single_launch(weights: Sequence[Tensor], rows: bool) -> Tensor:
    """[weights, n, k]: `of_weights`."""
    first = weights[0]
    _check(first, True)
    out = first.new_empty(len(weights), *first.shape)
    n, k = first.shape
    KERNEL.launch(
        (len(weights) * n // BLOCK, triton.cdiv(k, WIDTH)), (first, out, out, offsets_of(weights), first),
        (n, k // BLOCK),
        (False, VECTOR if all_aligned(weights) else 1, rows, not rows, *TYPES[E4M3], WIDTH // BLOCK),
    )  # fmt: skip
    return out


@triton.jit
def _to_mx(x, along: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr, DIGITS: tl.constexpr):
    # bf16 is the upper half of fp32, and all numbers here have a lower half of zeros.
    whole = x.to(tl.int16, bitcast=True).to(tl.int32)
    bits = whole & 0x7FFF
    amax = tl.max(tl.where(bits > 0x7F80, 0, bits), along, keep_dims=True)
    code = tl.maximum((amax >> 7) - LARGEST + ((amax & 127) > 96).to(tl.int32), 0)
    code = tl.where(amax == 0x7F80, 254, code)
    # 2^(127 - code) and its inverse; an end of each is subnormal.
    inverse = tl.where(code == 254, 0x00400000, (254 - code) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(code == 0, 0x00400000, code << 23).to(tl.float32, bitcast=True)
    y = (bits << 16).to(tl.float32, bitcast=True) * inverse
    # Added to 1.5 · 2^(23 - DIGITS) times its power of two, a number is rounded to DIGITS bits beside the first.
    field = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7F800000, (127 - LEAST) << 23)
    shift = (((field + ((23 - DIGITS) << 23)) & 0x7F800000) | 0x400000).to(tl.float32, bitcast=True)
    number = ((y + shift) - shift) * scale
    rounded = (number.to(tl.int32, bitcast=True) >> 16) | (whole & -0x8000)  # zeros keep their sign, as codes do
    return tl.where(bits >= 0x7F80, whole, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["count", "across"])
def _mxfp8(
    x, by_rows, by_columns, starts, ends, count, across,
    GROUPED: tl.constexpr, SEPARATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, DIGITS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    start, end = tl.program_id(0).to(tl.int64) * 32, count.to(tl.int64)
    if GROUPED:
        start, end = tl.load(starts + tl.program_id(0)), tl.load(ends + tl.program_id(0))
    if SEPARATE:  # x is the first of matrices of `count` rows; starts: their offsets from it, multiples of SEPARATE
        number = tl.program_id(0) // (count // 32)
        x += tl.multiple_of(tl.load(starts + number), SEPARATE) - number.to(tl.int64) * count * (across * 32)
        end = start + 32
    row = start + tl.arange(0, 32)[:, None, None]
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :, None]
    column = block * 32 + tl.arange(0, 32)[None, None, :]
    inside = (row < end) & (block < across)
    place = row * (across * 32) + column
    values = tl.load(x + place, mask=inside, other=0.0)
    if ROWS:
        tl.store(by_rows + place, _to_mx(values, 2, LARGEST, LEAST, DIGITS), mask=inside)
    if COLUMNS:
        tl.store(by_columns + place, _to_mx(values, 0, LARGEST, LEAST, DIGITS), mask=inside)


KERNEL = Kernel(_mxfp8, enable_fp_fusion=False)
