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
from tp_invariant_recipes.numerics.gemm.operands import Split, like, parts_of, same_bits, without_gaps

LEAST = 256  # numbers of a result; exactness checks of a smaller one would say little about how it is summed
TRIALS = 4
ALIGNMENT = 64  # bytes of a cache line, and of what torch allocates

# (form, shapes, strides, dtype, alignment, threads, shards) -> whether all shards in one call have the right bits.
_batched_is_exact: dict[tuple[Any, ...], bool] = {}

Form = Callable[[Tensor, Tensor], Tensor]


def gemm(a: Tensor, b: Tensor, rows: Split, columns: Split) -> Tensor:
    """Compute a @ b in fp32; arguments as of numerics/gemm/gemm.py.

    returns: [m, n] fp32, fp64 for operands of fp64.
    """
    a, b = _wide(a), _wide(b)

    def shard_by_shard(a: Tensor, b: Tensor) -> Tensor:
        if rows != 1:
            b = without_gaps(b)
            return torch.cat([torch.mm(without_gaps(x), b) for x in parts_of(a, rows, 0)])
        a = without_gaps(a)
        return torch.cat([torch.mm(a, without_gaps(y)) for y in parts_of(b, columns, 1)], 1)

    if rows == columns == 1:
        return torch.mm(without_gaps(a), without_gaps(b))
    return (torch.mm if is_exact(torch.mm, shard_by_shard, a, b, rows, columns) else shard_by_shard)(a, b)


def partials(a: Tensor, b: Tensor, shards: int, segments: tuple[int, ...]) -> Tensor:
    """Compute a @ b for each shard of the dimension that is summed.

    a, b:     [m, k] and [k, n]; k consists of segments, each of `shards` shards.
    segments: the size of each in k.
    returns:  [shards, m, n] fp32: the sum over segments, in order, of the segment's product.
    """
    a_given, b_given = a, b
    a, b = _wide(a), _wide(b)
    total = None
    for x, y in zip(a.split(segments, 1), b.split(segments), strict=True):
        part = _batch(x.view(len(x), shards, -1).transpose(0, 1), y.view(shards, -1, y.shape[1]))
        total = part if total is None else total.add_(part)
    summed = total.float()  # type: ignore[union-attr]
    sampling.take_partials(a_given, b_given, summed, segments)
    return summed


def is_exact(batched: Form, looped: Form, a: Tensor, b: Tensor, *kind: Any) -> bool:
    """Whether `batched` has the bits of `looped` for operands that lie in memory as these do.

    kind: what else tells apart GEMMs of such operands.
    """
    key = (
        batched.__name__, a.shape, b.shape, a.stride(), b.stride(), a.dtype,
        a.data_ptr() % ALIGNMENT, b.data_ptr() % ALIGNMENT, torch.get_num_threads(), *kind,
    )  # fmt: skip
    exact = _batched_is_exact.get(key)
    if exact is None:
        exact = a.shape[:-1].numel() * b.shape[-1] >= LEAST
        exact = exact and all(same_bits(batched(x, y), looped(x, y)) for x, y in _trials(a, b))
        _batched_is_exact[key] = exact
    return exact


def _batch(a: Tensor, b: Tensor) -> Tensor:
    """[n, m, k] @ [n, k, p] → [n, m, p]."""
    return (torch.bmm if is_exact(torch.bmm, _looped, a, b) else _looped)(a, b)


def _looped(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([torch.mm(without_gaps(x), without_gaps(y)) for x, y in zip(a, b, strict=True)])


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
