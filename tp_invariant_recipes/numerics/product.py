"""Matrix products on the shape of one virtual shard.

A product is *defined* shard by shard, on operands laid out without gaps and into memory of its own: shapes,
transposition and dtypes, which are the same for every t, and nothing else, decide its bits. A library may choose
another algorithm for the strides of a slice, for several shards at once, or when it adds to what the output holds.
So the faster form, one launch that reads slices where they are and writes or adds in place, is taken only for shapes
and strides for which it was seen, on this machine and in this process, to give the bits of the definition.
numerics/cpu_product.py does the same for a CPU, with what its libraries have.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.numerics import cpu_product
from tp_invariant_recipes.numerics.shard_operands import Parts, like, parts_of, without_gaps

# (shapes, strides, dtypes, alignment, shards, add) -> whether the product in one launch has the bits of the definition.
_in_place_is_right: dict[tuple[Any, ...], bool] = {}


def product(a: Tensor, b: Tensor, out: Tensor, *, rows: Parts = 1, columns: Parts = 1, add: bool = False) -> Tensor:
    """out = a @ b, or out += a @ b: fp32 accumulation, rounded once to out's dtype, then added.

    a:             [m, k]; b: [k, n], of a's dtype; either may be a slice or transposed.
    out:           [m, n] of a's dtype or fp32; may be a slice of rows or columns.
    rows, columns: shards that m or n consists of, each a product of its own by definition; not both.
    returns:       out.
    """
    if not a.is_cuda:
        result = cpu_product.product(a, b, rows, columns)
        return out.add_(result.to(out.dtype)) if add else out.copy_(result)
    key = (
        a.shape, b.shape[1], a.stride(), b.stride(), out.stride(), a.dtype, out.dtype, rows, columns, add,
        a.data_ptr() % 16, b.data_ptr() % 16, out.data_ptr() % 16,
    )  # fmt: skip
    right = _in_place_is_right.get(key)
    if right is None:
        right = _in_place_is_right[key] = _seen_to_be_right(a, b, out, rows, columns, add)
    return _in_place(a, b, out, add) if right else _defined(a, b, out, rows, columns, add)


def shown() -> dict[tuple[Any, ...], bool]:
    """For every kind of product so far, whether it was done in place; for reports and tests."""
    return dict(_in_place_is_right)


def _defined(a: Tensor, b: Tensor, out: Tensor, rows: Parts, columns: Parts, add: bool) -> Tensor:
    for part, x, y in _shards(a, b, out, rows, columns):
        result = _multiplied(x, y, out.dtype)
        part.add_(result) if add else part.copy_(result)
    return out


def _shards(a: Tensor, b: Tensor, out: Tensor, rows: Parts, columns: Parts) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    if rows != 1:
        b = without_gaps(b)
        for part, x in zip(parts_of(out, rows, 0), parts_of(a, rows, 0), strict=True):
            yield part, without_gaps(x), b
    else:
        a = without_gaps(a)
        for part, y in zip(parts_of(out, columns, 1), parts_of(b, columns, 1), strict=True):
            yield part, a, without_gaps(y)


def _multiplied(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b)


def _in_place(a: Tensor, b: Tensor, out: Tensor, add: bool) -> Tensor:
    if out.dtype == a.dtype:
        return torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    return torch.addmm(out, a, b, out.dtype, out=out) if add else torch.mm(a, b, out.dtype, out=out)


def _seen_to_be_right(a: Tensor, b: Tensor, out: Tensor, rows: Parts, columns: Parts, add: bool) -> bool:
    """Try both forms on random numbers that lie in memory as these operands do, without touching `out`."""
    with torch.random.fork_rng(devices=[a.device]):
        torch.manual_seed(0)
        a, b, first, second = (like(tensor, 16).normal_() for tensor in (a, b, out, out))
    second.copy_(first)
    try:
        _in_place(a, b, first, add)
    except RuntimeError:  # a layout that the library does not take
        return False
    _defined(a, b, second, rows, columns, add)
    return torch.equal(first, second)
