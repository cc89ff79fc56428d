# SPDX-License-Identifier: Apache-2.0
"""The sum of several shards in one launch: a product that restarts its accumulator at every border between them.

    out = (p0 + p1) + (p2 + p3),  p_i = a[:, piece i] @ b[piece i, :]

A tile of `out` walks k from the first piece to the last. At the end of a piece the accumulator is a term of the tree.
It and a sum of two wait for their neighbours in registers, a sum of four in shared memory, one of eight in global
memory that stays in the cache, and the next piece begins with zeros. In FP8 sums of two and four wait a place further.
So a tile of `out` reaches memory once, rounded if it is the root. Products of a library, one a piece, write all of
`out`, and read and write it again for the next.

A piece has the bits of fixed-tile GEMMs (fixed_tile_gemm.py): a tensor core adds along k in order. Between pieces
are IEEE additions in fp32. numerics/gemm/contraction.py tries both on the GPU at hand.

FP8 operands have the bits of kernels/gemm/fp8_tiles.py.

kernels/gemm/segmented_k_kernel.py is the kernel, of compute capability 9.0. `in_order` is the function by other
kernels.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tp_invariant_recipes.kernels.gemm import fp8_tiles
from tp_invariant_recipes.kernels.gemm.fixed_tile_gemm import fixed_tile_gemm
from tp_invariant_recipes.kernels.gemm.fp8_tiles import UNFUSED, kind
from tp_invariant_recipes.kernels.gemm.quantize import E4M3, E5M2, Quantized
from tp_invariant_recipes.kernels.gemm.segmented_k_kernel import OF_BLOCKS, OF_TENSORS, UNSCALED, _restarting_product

STEP = 16  # products added at once
KEPT_BITS = 25  # bits kept below the largest exponent
LEAST_TOP = -133  # exponent of the smallest bf16 number
NAN = 0x7FFFFFFF


SEGMENTS = (1, 2)  # of three, the sum in order would not be the tree
PIECES = (2, 4, 8, 16)  # how many one launch can add
TILE = 128  # rows and columns of a tile of `out`
STEP_BYTES = 128  # of a row in a step of the pipeline: 64 numbers of k in bf16, 128 in FP8
ROWS = TILE // 2  # of a tile that one group of warps multiplies
ROOM = 224 * 1024  # bytes of shared memory, of 227 KiB: for steps, and for a sum that waits or leaves
GROUP = 8  # rows of tiles computed together, so that b's tiles stay in the cache
WARPS = 4  # of a group that multiplies
NUMBERS = {
    torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, E4M3: gl.float8e4nv, E5M2: gl.float8e5,
}  # fmt: skip

Operand = Any  # a bf16 matrix, or Quantized


@dataclass(frozen=True)
class Cut:
    """The part of k that a launch sums.

    k consists of `segments` segments, each of `all_shards` shards. A shard's term is the sum of its pieces,
    one a segment.
    shards: consecutive ones of these. segments: 1 or 2.
    """

    shards: range
    all_shards: int
    segments: int

    @property
    def pieces(self) -> int:
        """How many products the launch adds."""
        return len(self.shards) * self.segments

    def size(self, k: int) -> int:
        """Of a piece, where k is the whole."""
        return k // self.segments // self.all_shards

    def slices(self, k: int) -> list[slice]:
        """Return the pieces of k, in the order of the tree."""
        size, segment = self.size(k), k // self.segments
        starts = [n * segment + shard * size for shard in self.shards for n in range(self.segments)]
        return [slice(start, start + size) for start in starts]


def suits(a: Operand, b: Operand, cut: Cut) -> bool:
    """Whether the kernel takes these operands, for an output without gaps."""
    x, y = matrices(a, b)
    fp8 = isinstance(b, Quantized)
    return (
        cut.pieces in PIECES
        and cut.segments in SEGMENTS
        and cut.size(x.shape[1]) % (STEP_BYTES // x.dtype.itemsize) == 0
        and (b.blocks != "1x128" if fp8 else x.dtype == y.dtype == torch.bfloat16)
        and x.is_cuda
        and _capability(x.get_device()) == (9, 0)
        and all(_rows_of_16_bytes(matrix) for matrix in (x, y if y.stride(1) == 1 else y.t()))
        and y.shape[1] % 8 == 0  # rows of 16 bytes in `out`
    )


def segmented_k_gemm(a: Operand, b: Operand, out: Tensor, cut: Cut, add: bool) -> None:
    """out = the tree sum of a[:, piece] @ b[piece, :] over the pieces of a cut, or out += that sum, added in fp32.

    a: [m, k] bf16; b: [k, n] bf16, which `suits` takes; out: [m, n] without gaps, fp32, or bf16 without `add`.
    Or a: [m, k] and b: [n, k] in FP8, "tensor" by "tensor" or "1x128" by "128x128".
    """
    (m, n), (x, y) = out.shape, matrices(a, b)
    transposed, step = y.stride(1) != 1, STEP_BYTES // x.dtype.itemsize
    size, tiles = cut.size(x.shape[1]), triton.cdiv(m, TILE) * triton.cdiv(n, TILE)
    programs = min(tiles, _processors(out.get_device()))
    taken = torch.zeros(1, dtype=torch.int32, device=out.device)
    spare = torch.empty(2 * programs * TILE * TILE if cut.pieces > 4 else 1, device=out.device)
    descriptors = (
        _descriptor(x, TILE, step),
        _descriptor(y.t(), TILE, step) if transposed else _descriptor(y, step, TILE),
        _descriptor(out, ROWS, TILE),
    )
    scaled, *scales = _scales(a, b, out)
    _restarting_product[(programs,)](
        *descriptors, out, *scales, taken, m, n, out.stride(0), cut.shards.start * size, x.shape[1] // cut.segments,
        spare, PIECES=cut.pieces, SEGMENTS=cut.segments, SIZE=size, TRANSPOSED=transposed, SCALED=scaled, ADD=add,
        STAGES=stages(cut.pieces, x.dtype, out.dtype), GROUP=GROUP, num_warps=WARPS, **UNFUSED,
    )  # fmt: skip


def in_order(a: Operand, b: Operand, out: Tensor, cut: Cut, add: bool) -> None:
    """Compute the segmented-K GEMM by fixed-tile GEMM for each piece; of bf16 on a CPU too."""
    slices = cut.slices(matrices(a, b)[0].shape[1])

    def tree(first: int, count: int) -> Tensor:
        if count > 2:
            return tree(first, count // 2).add_(tree(first + count // 2, count // 2))
        total = torch.empty_like(out, dtype=torch.float32)
        for n, k in enumerate(slices[first : first + count]):  # adding to it rounds as a separate addition would
            if isinstance(a, Quantized):
                piece = k.start, k.stop - k.start
                fp8_tiles.gemm(a.along_k(*piece), b.along_k(*piece), total, n > 0)
            else:
                fixed_tile_gemm(a[:, k], b[k], total, add=n > 0)
        return total

    total = tree(0, len(slices))
    out.copy_(out + total if add else total)


def stages(pieces: int, operand: torch.dtype, out: torch.dtype) -> int:
    """How many steps of the pipeline shared memory has room for, beside a sum that waits and the tile that leaves."""
    waits = pieces > (4 if operand == torch.bfloat16 else 2)
    return (ROOM - TILE * TILE * (4 if waits else out.itemsize)) // (2 * TILE * STEP_BYTES)


def matrices(a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
    """[m, k] and [k, n], without scales."""
    return (a.data, b.data.t()) if isinstance(a, Quantized) else (a, b)


def _scales(a: Operand, b: Operand, out: Tensor) -> tuple[Any, ...]:
    """Return what the scales are, and those of a and b with the strides of rows and blocks; of bf16 none is read."""
    if not isinstance(a, Quantized):
        return UNSCALED.value, out, out, 0, 0, 0, 0
    if kind(a, b) == "tensor":
        return OF_TENSORS.value, a.scale, b.scale, 0, 0, 0, 0
    return OF_BLOCKS.value, a.scale, b.scale, *a.scale.stride(), *b.scale.stride()


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout(rows, columns, matrix.dtype))


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Of a tile in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], NUMBERS[dtype])


def _rows_of_16_bytes(matrix: Tensor) -> bool:
    """Whether TMA can copy tiles of a matrix."""
    return matrix.stride(1) == 1 and matrix.data_ptr() % 16 == matrix.stride(0) * matrix.dtype.itemsize % 16 == 0
