# SPDX-License-Identifier: Apache-2.0
"""Matrix GEMMs of virtual shards on a CPU: all shards in one call, where that keeps the bits of each.

By definition (numerics/gemm/gemm.py) every shard is a GEMM of its own, on operands without gaps. MKL gives a
shard the same bits inside a larger GEMM, or in a batch of any number, for most shapes, and other bits for some: a
single row or column, a few odd numbers. So one call for all shards is taken only for shapes, strides and alignment for
which it was seen, on this machine and in this process, to give the bits of the definition. The bits never depend on the
outcome.

bf16 operands become fp32 first: in bf16 most CPUs multiply number by number, several times slower.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.numerics.gemm import sampling
from tp_invariant_recipes.numerics.gemm.operands import Split, along_k, like, parts_of, same_bits, without_gaps

LEAST = 256  # numbers of a result; exactness checks of a smaller one would say little about how it is summed
TRIALS = 4
ALIGNMENT = 64  # bytes of a cache line, and of what torch allocates

# (form, shapes, strides, dtype, alignment, threads, shards) -> whether all shards in one call have the right bits.
_batched_is_exact: dict[tuple[Any, ...], bool] = {}

Form = Callable[..., Tensor]  # of the operands of a GEMM


def gemm(a: Tensor, b: Tensor, rows: Split, columns: Split, onto: Tensor | None = None) -> Tensor:
    """Compute a @ b in fp32; arguments as of numerics/gemm/gemm.py.

    onto:    [m, n] fp32 that the product is added to, in one call where that rounds as a separate addition does.
    returns: [m, n] fp32, fp64 for operands of fp64; with `onto`, that.
    """
    a, b = _wide(a), _wide(b)
    if onto is not None:
        fits = onto.dtype == a.dtype and onto.is_contiguous()
        if fits and is_exact(_added, _added_apart, a, b, rows, columns, onto.data_ptr() % ALIGNMENT):
            return torch.addmm(onto, a, b, out=onto)
        return onto.add_(gemm(a, b, rows, columns).to(onto.dtype))
    if rows == columns == 1:
        return torch.mm(without_gaps(a), without_gaps(b))
    return (_whole if is_exact(_whole, _shard_by_shard, a, b, rows, columns) else _shard_by_shard)(a, b, rows, columns)


def _whole(a: Tensor, b: Tensor, rows: Split, columns: Split) -> Tensor:
    return torch.mm(a, b)


def _shard_by_shard(a: Tensor, b: Tensor, rows: Split, columns: Split) -> Tensor:
    if rows != 1:
        b = without_gaps(b)
        return torch.cat([torch.mm(without_gaps(x), b) for x in parts_of(a, rows, 0)])
    a = without_gaps(a)
    return torch.cat([torch.mm(a, without_gaps(y)) for y in parts_of(b, columns, 1)], 1)


def _added(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return torch.addmm(_before(a, b), a, b)


def _added_apart(a: Tensor, b: Tensor, rows: Split, columns: Split, _alignment: int) -> Tensor:
    return _before(a, b).add_(_shard_by_shard(a, b, rows, columns))


def _before(a: Tensor, b: Tensor) -> Tensor:
    """Return numbers as large as those of a @ b, of both signs, to which an exactness check adds it."""
    return torch.matmul(a, b).flip(-1).neg_()


def partials(a: Tensor, b: Tensor, shards: int, segments: tuple[int, ...]) -> Tensor:
    """Compute a @ b for this rank's part of the dimension that is summed.

    a, b:     [m, k] and [k, p]; k consists of segments, each of `shards` shards.
    segments: the size of each in k.
    returns:  [n, m, p] fp32: each shard's sum over segments, in order, of the segment's product, or the sums of
              neighbours: nodes of the tree over all shards, n a power of two.
    """
    x, y = _wide(a), _wide(b)
    form = _in_place if is_exact(_in_place, _looped, x, y, shards, segments) else _looped
    summed = form(x, y, shards, segments).float()
    sampling.take_partials(a, b, summed, shards, segments)
    return summed


def _pairs(a: Tensor, shards: int, segments: tuple[int, ...]) -> bool:
    """Whether neighbours are added: they are no sums of segments, and fp64 is not rounded before it is added."""
    return len(segments) == 1 < shards and a.dtype != torch.float64


def _in_place(a: Tensor, b: Tensor, shards: int, segments: tuple[int, ...]) -> Tensor:
    """Add each batch of products to the one before: in one segment those of odd shards to those of even ones."""
    if _pairs(a, shards, segments):
        size = segments[0] // shards
        cuts = [(start, size, 2 * size, shards // 2) for start in (0, size)]
    else:
        sizes = [segment // shards for segment in segments]
        cuts = [(sum(segments[:n]), size, size, shards) for n, size in enumerate(sizes)]
    total = torch.bmm(*along_k(a, b, *cuts[0]))
    for cut in cuts[1:]:
        torch.baddbmm(total, *along_k(a, b, *cut), out=total)
    return total


def _looped(a: Tensor, b: Tensor, shards: int, segments: tuple[int, ...]) -> Tensor:
    total, start = None, 0
    for segment in segments:
        size = segment // shards
        operands = zip(*along_k(a, b, start, size, size, shards), strict=True)
        part = torch.stack([torch.mm(without_gaps(x), without_gaps(y)) for x, y in operands])
        total, start = part if total is None else total.add_(part), start + segment
    assert total is not None
    return total[::2] + total[1::2] if _pairs(a, shards, segments) else total


def is_exact(batched: Form, looped: Form, a: Tensor, b: Tensor, *kind: Any) -> bool:
    """Whether `batched` has the bits of `looped` for operands that lie in memory as these do.

    kind: further arguments of both.
    """
    key = (
        batched.__name__, a.shape, b.shape, a.stride(), b.stride(), a.dtype,
        a.data_ptr() % ALIGNMENT, b.data_ptr() % ALIGNMENT, torch.get_num_threads(), *kind,
    )  # fmt: skip
    exact = _batched_is_exact.get(key)
    if exact is None:
        exact = a.shape[:-1].numel() * b.shape[-1] >= LEAST
        exact = exact and all(same_bits(batched(x, y, *kind), looped(x, y, *kind)) for x, y in _trials(a, b))
        _batched_is_exact[key] = exact
    return exact


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _trials(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Operands of which each kind shows another difference: the order of additions and whether GEMMs are rounded,
    numbers too small for normal ones, the sign of a sum of zeros."""
    generator = torch.Generator().manual_seed(0)

    def normal(tensor: Tensor) -> Tensor:
        return like(tensor, ALIGNMENT).normal_(generator=generator)

    for _ in range(TRIALS):
        yield normal(a), normal(b)
    yield normal(a).mul_(2.0**-70), normal(b).mul_(2.0**-70)
    # A row's zeros have one sign, and a column's numbers too: a sum of -0.0 alone is -0.0, unless it starts at 0.0.
    rows, columns = normal(a[..., :1]).sign(), normal(b[..., :1, :]).sign()
    yield like(a, ALIGNMENT).copy_((rows * 0.0).expand_as(a)), like(b, ALIGNMENT).copy_(columns.expand_as(b))
