"""Matrix products on the shape of one virtual shard.

A product is *defined* shard by shard, on operands laid out without gaps and into memory of its own: shapes,
transposition and dtypes, which are the same for every t, and nothing else, decide its bits. A library may choose
another algorithm for the strides of a slice, for several shards at once, or when it adds to what the output holds.
So the faster form, one launch that reads slices where they are and writes or adds in place, is taken only for shapes
and strides for which it was seen, on this machine and in this process, to give the bits of the definition. The trial's
operands cancel (numerics/probe_operands.py): on others a bf16 output hides most differences.
numerics/cpu_product.py does the same for a CPU, with what its libraries have.
"""

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.numerics import cpu_product
from tp_invariant_recipes.numerics.cublas_product import agree, kind, tried
from tp_invariant_recipes.numerics.cublas_product import launch as _in_place
from tp_invariant_recipes.numerics.shard_operands import Parts, like, parts_of, same_bits, without_gaps

CHECK = "TPI_CHECK_PRODUCTS"  # 1: compute every product both ways, on the operands of the run, and compare

# (shards, kind of product) -> whether the product in one launch has the bits of the definition.
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
    right = _right(a, b, out, rows, columns, add)
    if right and checking():
        return _checked(a, b, out, rows, columns, add)
    return _in_place(a, b, out, add) if right else _defined(a, b, out, rows, columns, add)


def _right(a: Tensor, b: Tensor, out: Tensor, rows: Parts, columns: Parts, add: bool) -> bool:
    """Whether the product may be one launch."""
    key = (rows, columns, *kind(a, b, out, add))
    return tried(_in_place_is_right, key, a, lambda: _seen_to_be_right(a, b, out, rows, columns, add))


def shown() -> dict[tuple[Any, ...], bool]:
    """For every kind of product so far, whether it was done in place; for reports and tests."""
    return dict(_in_place_is_right)


@cache
def checking() -> bool:
    """Whether every product and every attention of this process is computed both ways."""
    return os.environ.get(CHECK, "0") == "1"


def _checked(a: Tensor, b: Tensor, out: Tensor, rows: Parts, columns: Parts, add: bool) -> Tensor:
    """Both forms on these operands. Raises RunError where their bits differ."""
    expected = like(out, 16).copy_(out) if add else like(out, 16)
    _defined(a, b, expected, rows, columns, add)
    _in_place(a, b, out, add)
    if not same_bits(out, expected):
        raise RunError(
            f"{CHECK}=1: a product {[*a.shape]} @ {[*b.shape]} in one launch has other bits than shard by shard "
            f"({a.dtype} to {out.dtype}, rows={rows}, columns={columns}, add={add}): the probe of numerics/product.py "
            f"did not see it"
        )
    return out


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


def _seen_to_be_right(a: Tensor, b: Tensor, out: Tensor, rows: Parts, columns: Parts, add: bool) -> bool:
    """Try both forms on operands that cancel and lie in memory as these do, without touching `out`."""
    return agree(_in_place, lambda x, y, part, add: _defined(x, y, part, rows, columns, add), a, b, out, add)
