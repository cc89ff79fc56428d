# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a sum over a sharded dimension, on a GPU: the nodes of the tree that its shards make.

    restarting   kernels/gemm/segmented_k_gemm.py: up to 16 GEMMs and their sums in one launch, where that pays,
                 the kernel takes the operands, and an exactness check has found the bits of fixed-tile GEMMs
    as a batch   the GEMMs of all shards in one launch of cuBLAS for each segment, where the host is the limit
    one by one   a GEMM for each shard and segment; the second of two neighbours adds itself to the first

All have the same bits, the first two by an exactness check. Its operands cancel (numerics/gemm/probe.py), and
TPI_CHECK_PRODUCTS=1 compares on those of the run, as for cuBLAS (numerics/gemm/cublas.py).
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.numerics.gemm import cublas, fp8_cublas, sampling
from tp_invariant_recipes.numerics.gemm.defined import by_fixed_tile_gemm
from tp_invariant_recipes.numerics.gemm.operands import along_k, every_part
from tp_invariant_recipes.numerics.sums.data_shards import each_context
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

# Multiplications of a sum that keeps a GPU busy for 0.1 ms, longer than the host needs for a launch through Triton. Of
# smaller ones a launch costs more than it saves where the host is the limit, unless a CUDA graph makes it.
WORTH = 2**35

Segments = tuple[int, ...]  # the size of each

# Numbers in fp32 of all terms of a batch: 256 MiB. One by one two neighbours share a place.
ROOM = 2**26

# kind of sum -> whether the segmented-K GEMM, or a batch, had the bits of fixed-tile GEMMs.
_restarting_is_exact = cublas.Verdicts("segmented-K GEMM")
_batch_is_exact = cublas.Verdicts("batch")


def nodes(
    a: Tensor, b: Tensor, mesh: VirtualMesh, segments: Segments, gemm: Callable[..., Tensor],
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Compute a @ b for this rank's part of the summed dimension, as nodes of the tree over all shards.

    a, b:     [tokens, k/t] and [k/t, features]; k/t consists of segments, each of this rank's V/t shards.
    segments: the size of each.
    gemm:     as `numerics.gemm.gemm.gemm`.
    dtype:    of the root of the tree, which one launch may round.
    returns:  [n, tokens, features] fp32, n a power of two that divides V/t: each the sum of (V/t)/n shards in tree
              order, where a shard's term is the sum over segments, in order. Or the root of `dtype`, n = 1.
    raises RunError: TPI_CHECK_PRODUCTS=1, and the segmented-K GEMM is not bitwise identical.
    """
    pays = mesh.graphs or a.shape[0] * a.shape[1] * b.shape[1] >= WORTH
    if pays:
        nodes_at_once = in_one_launch(a, b, mesh.local, segments, dtype if mesh.size == 1 else torch.float32)
    else:
        nodes_at_once = _as_a_batch(a, b, mesh.local, segments)
    if nodes_at_once is not None and (taking := sampling.begin(a, b, nodes_at_once[0], False, segments)) is not None:
        taking.end(nodes_at_once, mesh.local)
    return nodes_at_once if nodes_at_once is not None else _looped(a, b, mesh, segments, gemm)


def _looped(a: Tensor, b: Tensor, mesh: VirtualMesh, segments: Segments, gemm: Callable[..., Tensor]) -> Tensor:
    # A term of several segments is a sum itself and needs a place of its own.
    width = 1 if len(segments) > 1 else min(2, mesh.local)
    nodes = _empty(mesh.local // width, a, b)
    for shard in range(mesh.local):
        node, add = nodes[shard // width], shard % width > 0
        before = 0
        for segment in segments:
            size = segment // mesh.local
            start = before + shard * size
            for rows, out in each_context(mesh, a.narrow(1, start, size), node):
                gemm(rows, b.narrow(0, start, size), out, add=add)
            before, add = before + segment, True
    return nodes


def _as_a_batch(a: Tensor, b: Tensor, shards: int, segments: Segments) -> Tensor | None:
    """Return the terms of all shards, a launch for each segment; None: one by one is as few, or it has not been found
    right.

    Rows of products on a GPU do not depend on each other, so tokens of several context shards share a launch.
    """
    if shards == 1 or shards * a.shape[0] * b.shape[1] > ROOM:
        return None
    terms = _empty(shards, a, b)
    kind = (*cublas.kind(a, b, terms, False), shards, segments)
    compute, defined = partial(_batch, segments), partial(_terms, segments)

    def trial() -> bool:
        return cublas.agree(compute, defined, a, b, terms, False, parts=_parts(segments, shards))

    if not cublas.tried(_batch_is_exact, kind, a, trial):
        return None
    return cublas.compute(compute, defined, a, b, terms, False, f"a batch of {shards} GEMMs")


def _batch(segments: Segments, a: Tensor, b: Tensor, terms: Tensor, _add: bool) -> None:
    """terms[v] = the sum over segments, in order, of shard v's GEMM, as batches of products."""
    shards, before = terms.shape[0], 0
    for segment in segments:
        size = segment // shards
        cublas.launch_batch(*along_k(a, b, before, size, size, shards), terms, before > 0)
        before += segment


def _terms(segments: Segments, a: Tensor, b: Tensor, terms: Tensor, _add: bool) -> None:
    """As `_batch`, by fixed-tile GEMMs, one by one."""
    for n, part in enumerate(_parts(segments, terms.shape[0])):
        by_fixed_tile_gemm(a[:, part], b[part], terms[n % terms.shape[0]], n >= terms.shape[0])


def _parts(segments: Segments, shards: int) -> list[slice]:
    """Return the summed dimension's part of every shard, segment after segment."""
    return [part for of_segment in zip(*every_part(segments, shards), strict=True) for part in of_segment]


def in_one_launch(a: Any, b: Any, shards: int, segments: Segments, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """Return the nodes by the segmented-K GEMM; None: it does not take the operands, or has not been found right.

    Its rows do not depend on each other, so tokens of several context shards share a launch.

    a, b:  as of `nodes`, or in FP8 as of numerics/gemm/fp8.py's.
    dtype: of a node that one launch makes.
    """
    if not _imports() or len({*segments}) > 1:
        return None
    from tp_invariant_recipes.kernels.gemm import segmented_k_gemm as kernel

    batch = max(1, min(shards, kernel.PIECES[-1] // len(segments)))
    launches = shards // batch
    width = min(2, launches)
    cuts = [kernel.Cut(range(n * batch, n * batch + batch), shards, len(segments)) for n in range(launches)]
    if not kernel.suits(a, b, cuts[0]):
        return None
    x, y = kernel.matrices(a, b)
    nodes = _empty(launches // width, x, y, dtype if launches == 1 else torch.float32)
    if not all(_matches_definition(a, b, nodes[0], cut, add=n > 0) for n, cut in enumerate(cuts[:width])):
        return None
    what = f"the sum of {cuts[0].pieces} GEMMs in one launch"
    for n, cut in enumerate(cuts):
        cublas.compute(*_forms(cut), a, b, nodes[n // width], n % width > 0, what)
    return nodes


def _matches_definition(a: Any, b: Any, out: Tensor, cut: Any, *, add: bool) -> bool:
    """Whether the segmented-K GEMM may compute it. While a CUDA graph is captured: only a kind tried before."""
    library: Any = cublas if isinstance(a, Tensor) else fp8_cublas
    kind = (*library.kind(a, b, out, add), cut)

    def trial() -> bool:
        from triton.errors import TritonError

        try:
            return library.agree(*_forms(cut), a, b, out, add)
        except TritonError as error:
            _say_off(f"does not compile its kernel: {str(error.__cause__ or error).splitlines()[-1]}")
            return False

    return cublas.tried(_restarting_is_exact, kind, out, trial)


def _forms(cut: Any) -> tuple[cublas.Product, cublas.Product]:
    from tp_invariant_recipes.kernels.gemm import segmented_k_gemm as kernel

    return (
        lambda a, b, out, add: kernel.segmented_k_gemm(a, b, out, cut, add),
        lambda a, b, out, add: kernel.in_order(a, b, out, cut, add),
    )


@cache
def _imports() -> bool:
    """Whether Gluon, which is experimental, has what the kernel imports from it. A trial compiles the kernel."""
    try:
        from tp_invariant_recipes.kernels.gemm import segmented_k_gemm  # noqa: F401
    except (ImportError, AttributeError) as error:
        _say_off(f"lacks what its kernel imports: {error}")
        return False
    return True


@cache
def _say_off(reason: str) -> None:
    text = "the segmented-K GEMM is off, and fixed tiles compute the same bits more slowly: Triton %s %s"
    logging.getLogger(__name__).warning(text, installed("triton"), reason)


def _empty(count: int, a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(count, a.shape[0], b.shape[1], dtype=dtype, device=a.device)
