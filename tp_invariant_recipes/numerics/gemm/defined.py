# SPDX-License-Identifier: Apache-2.0
"""Products of matrices that walk k in order, by whatever computes that sum on a device.

tensor_core_sum.py defines the sum of bf16 products, as a Hopper tensor core adds them. Rows and columns of such
a GEMM do not depend on how many lie beside them, so shards may share a call. The virtual shards decide the order of
sums across them only: those are IEEE additions in fp32.

numerics=portable has these GEMMs everywhere. numerics=tree has them on GPUs, and numerics/gemm/cpu.py on CPUs;
it does not ask whether a GPU adds as a Hopper does: there fixed-tile GEMMs are the definition, on the GPU at hand.
"""

import torch
from torch import Tensor

from tp_invariant_recipes.numerics.gemm import cublas, sampling
from tp_invariant_recipes.numerics.gemm.cublas import Product
from tp_invariant_recipes.numerics.gemm.operands import Split


def by_numba(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """Compute a GEMM on a CPU."""
    from tp_invariant_recipes.kernels.cpu import tensor_core_cpu  # loads numba

    if add and out.dtype == torch.float32:
        tensor_core_cpu.gemm(a, b, onto=out)
    else:
        total = tensor_core_cpu.gemm(a, b)
        out.copy_(total.add_(out) if add else total)


def by_fixed_tile_gemm(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """Compute a GEMM on a GPU, for any layout."""
    from tp_invariant_recipes.kernels.gemm.fixed_tile_gemm import fixed_tile_gemm

    fixed_tile_gemm(a, b, out, add=add)


# kind of GEMM -> whether cuBLAS had the bits of fixed-tile GEMMs.
_cublas_is_exact = cublas.Verdicts("GEMM")


def gemm(a: Tensor, b: Tensor, out: Tensor, *, rows: Split = 1, columns: Split = 1, add: bool = False) -> Tensor:
    """Return the GEMM of numerics=portable: out = a @ b, rounded once to out's dtype; or out += a @ b, an addition
    in fp32.

    a:             [m, k]; b: [k, n], both bf16, with any strides.
    out:           [m, n] bf16 or fp32, with any strides.
    rows, columns: shards of m or n, which change nothing: a row's and a column's result is its own.
    returns:       out.
    raises TypeError: other dtypes.
    """
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        raise TypeError(f"numerics=portable multiplies bf16 numbers, not {a.dtype} and {b.dtype}")
    return compute(a, b, out, add)


def compute(a: Tensor, b: Tensor, out: Tensor, add: bool) -> Tensor:
    """out = a @ b or out += a @ b by what is chosen for it, all of which give the same bits.

    a, b:    [m, k] and [k, n], on a GPU both bf16 or both fp32, on a CPU bf16, with any strides.
    out:     [m, n] bf16 or fp32, with any strides.
    returns: out.
    raises TypeError: other dtypes; RunError: TPI_CHECK_PRODUCTS=1, and cuBLAS is not bitwise identical.
    """
    way = chosen(a, b, out, add)
    taking = sampling.begin(a, b, out, add)
    if way is cublas.launch:
        cublas.compute(way, by_fixed_tile_gemm, a, b, out, add, "cuBLAS's GEMM")
    else:
        way(a, b, out, add)
    if taking is not None:
        taking.end()
    return out


def chosen(a: Tensor, b: Tensor, out: Tensor, add: bool) -> Product:
    """Return what computes the GEMM on its device; docs/arithmetic.md says why all are believed to agree."""
    return by_numba if a.is_cpu else _on_gpu(a, b, out, add)


def _on_gpu(a: Tensor, b: Tensor, out: Tensor, add: bool) -> Product:
    return cublas.launch if _matches_definition(a, b, out, add) else by_fixed_tile_gemm


def _matches_definition(a: Tensor, b: Tensor, out: Tensor, add: bool) -> bool:
    """Whether cuBLAS may compute it. While a CUDA graph is captured: only a kind that was tried before."""
    kind = cublas.kind(a, b, out, add)
    return cublas.tried(
        _cublas_is_exact, kind, a, lambda: cublas.agree(cublas.launch, by_fixed_tile_gemm, a, b, out, add)
    )


def partials(a: Tensor, b: Tensor, shards: int, segments: tuple[int, ...]) -> Tensor:
    """Compute a @ b for each shard of the dimension that is summed.

    a, b:     [m, k] and [k, n] bf16 on the CPU; k consists of segments, each of `shards` shards.
    segments: the size of each in k.
    returns:  [shards, m, n] fp32: the sum over segments, in order, of the segment's product.
    """
    from tp_invariant_recipes.kernels.cpu import tensor_core_cpu  # loads numba

    total = None
    for x, y in zip(a.split(segments, 1), b.split(segments), strict=True):
        part = tensor_core_cpu.partials(x, y, shards)
        total = part if total is None else total.add_(part)
    assert total is not None
    if (taking := sampling.begin(a, b, total[0], False, segments)) is not None:
        taking.end(total, shards)
    return total
