# SPDX-License-Identifier: Apache-2.0
"""Products of FP8 matrices, `fp8 tiles 1` (kernels/gemm/fp8_tiles.py), by whatever computes them on a device.

A row's and a column's bits do not depend on how many lie beside it, so shards of rows and columns may share a call. A
shard of k is a GEMM of its own, and a multiple of 128: `along_k` cuts it, `nodes` adds in tree order: in one launch
where contraction.py's exactness check agrees, else one by one.
"""

from collections.abc import Sequence
from itertools import accumulate, batched, chain

import torch
from torch import Tensor

from tp_invariant_recipes.kernels.gemm.fp8_tiles import kind
from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups
from tp_invariant_recipes.kernels.gemm.quantize import BLOCK, Quantized
from tp_invariant_recipes.numerics.gemm import contraction, cublas, fp8_cublas
from tp_invariant_recipes.numerics.gemm.contraction import Segments
from tp_invariant_recipes.numerics.gemm.operands import every_part
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh


def gemm(a: Quantized, b: Quantized, out: Tensor, add: bool = False) -> Tensor:
    """out = a @ b^T, the fp32 output of the definition rounded once to out's dtype; or out += it, one IEEE addition.

    a, b:    [m, k] and [n, k]: tensor by tensor, 1x128 by 1x128 or 1x128 by 128x128; at most one of them e5m2.
    out:     [m, n] fp32 or bf16, with any strides; fp32 where `add`.
    returns: out.
    raises TypeError: other blocks or dtypes; ValueError: other shapes; RunError: TPI_CHECK_PRODUCTS=1, and cuBLAS has
    other bits.
    """
    kind(a, b)
    if out.shape != (a.data.shape[0], b.data.shape[0]):
        raise ValueError(f"a GEMM of {[*a.data.shape]} and {[*b.data.shape]}^T is not {[*out.shape]}")
    if out.dtype != torch.float32 and (add or out.dtype != torch.bfloat16):
        raise TypeError(f"an FP8 GEMM in {out.dtype} (add={add}); fp32, or bf16 without add")
    (on_cpu if out.is_cpu else _on_gpu)(a, b, out, add)
    return out


def on_cpu(a: Quantized, b: Quantized, out: Tensor, add: bool) -> None:
    """Compute a GEMM on a CPU."""
    from tp_invariant_recipes.kernels.cpu import fp8_cpu, tensor_core_cpu  # load numba

    total = fp8_cpu.gemm(a, b)
    if add:
        out.add_(total)
    else:
        out.copy_(tensor_core_cpu.rounded(total) if out.dtype == torch.bfloat16 else total)


def _on_gpu(a: Quantized, b: Quantized, out: Tensor, add: bool) -> None:
    from tp_invariant_recipes.kernels.gemm import fp8_tiles

    if fp8_cublas.matches_definition(a, b, out, add, fp8_tiles.gemm):
        what = f"cuBLAS's FP8 GEMM with scales of {b.blocks}"
        cublas.compute(fp8_cublas.launch, fp8_tiles.gemm, a, b, out, add, what)
    else:
        fp8_tiles.gemm(a, b, out, add)


def nodes(
    a: Quantized, b: Quantized, mesh: VirtualMesh, segments: Segments, dtype: torch.dtype = torch.float32
) -> Tensor:  # fmt: skip
    """As numerics/gemm/contraction.py's `nodes`: a @ b^T for this rank's part of k, as nodes of the tree.

    a, b:     [tokens, k/t] and [features, k/t]; k/t consists of segments, each of this rank's V/t shards; with blocks a
              shard is a multiple of 128, so that blocks stay where they are whatever the number of ranks.
    segments: the size of each.
    dtype:    of the root of the tree.
    returns:  [n, tokens, features] fp32, n a power of two that divides V/t: each the sum of (V/t)/n shards in tree
              order, where a shard's term is the sum over segments, in order. Or the root of `dtype`, n = 1.
    raises RunError: TPI_CHECK_PRODUCTS=1, and the segmented-K GEMM is not bitwise identical.
    """
    root = dtype if mesh.size == 1 else torch.float32
    roots = contraction.in_one_launch(a, b, mesh.local, segments, dtype=root)
    return looped(a, b, mesh.local, segments) if roots is None else roots


def looped(a: Quantized, b: Quantized, shards: int, segments: Segments) -> Tensor:
    """As `nodes`, by a GEMM for each shard and segment. shards: of this rank."""
    # A term of several segments is a sum itself and needs a place of its own.
    width = 1 if len(segments) > 1 else min(2, shards)
    pieces = batched(chain(*every_part(segments, shards)), width * len(segments))
    total = torch.empty(shards // width, a.data.shape[0], b.data.shape[0], device=a.data.device)
    for out, slices in zip(total, pieces, strict=True):
        for number, k in enumerate(slices):
            piece = k.start, k.stop - k.start
            gemm(a.along_k(*piece), b.along_k(*piece), out, add=number > 0)
    return total


def grouped_gemm(x: Quantized, weights: Sequence[Quantized], out: Tensor, groups: Groups) -> None:
    """out[rows of g] = x[rows of g] @ weights[g]^T, each a `product`; forward and input gradients of experts.

    x:       [rows, k], rows of group after group; "tensor" or "1x128". For "tensor" its scale is [] or [groups].
    weights: [n, k] a group; of an input gradient the transposed weight. "tensor", or for "1x128" blocks of 128x128.
    out:     [rows, n] bf16 or fp32, contiguous.
    """
    if out.is_cuda:
        from tp_invariant_recipes.kernels.gemm import fp8_tiles

        return fp8_tiles.grouped_gemm(x, weights, out, groups)
    start = 0
    for g, (size, weight) in enumerate(zip(groups.sizes, weights, strict=True)):
        if size:
            rows = _of_group(x, g).of_rows(start, size)
            gemm(rows, weight, out[start : start + size])
        start += size


def grouped_weight_gradient(
    dy: Quantized, x: Quantized, outs: Sequence[Tensor], groups: Groups, chain: Sequence[int] = (0,)
) -> None:
    """outs[i] += dy[:, rows of g] @ x[:, rows of g]^T, each a `product` with add, one group g after the other.

    A group is the tokens of one expert from one source.

    dy, x: [n, rows] and [k, rows]: transposed, so that rows, which are summed, are contiguous. "tensor" with a scale []
           or [groups]; or "1x128", where every group's rows are a multiple of 128 (zeros change nothing).
    outs:  [n, k] fp32 each, contiguous; outs[i] has the groups from i · len(chain) on.
    chain: the order of an output's groups.
    raises ValueError: "1x128", and a group whose rows are no multiple of 128.
    """
    if dy.blocks != "tensor" and any(size % BLOCK for size in groups.sizes):
        raise ValueError(f"groups of {[*groups.sizes]} rows split blocks of {BLOCK}; pad each with zeros")
    if dy.data.is_cuda:
        from tp_invariant_recipes.kernels.gemm import fp8_tiles

        return fp8_tiles.grouped_weight_gradient(dy, x, outs, groups, chain)
    starts = [0, *accumulate(groups.sizes)]
    for i, out in enumerate(outs):
        for g in (i * len(chain) + link for link in chain):
            if groups.sizes[g]:
                dy_group, x_group = (_of_group(operand, g).along_k(starts[g], groups.sizes[g]) for operand in (dy, x))
                gemm(dy_group, x_group, out, add=True)


def _of_group(x: Quantized, group: int) -> Quantized:
    if x.blocks == "tensor" and x.scale.numel() > 1:
        return Quantized(x.data, x.scale[group], x.blocks)
    return x
