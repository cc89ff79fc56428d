"""Matrix products on the shape of one virtual shard.

A product is *defined* on operands laid out without gaps and into memory of its own: shapes, transposition and dtypes,
which are the same for every t, and nothing else, decide its bits. A library may choose another algorithm for the
strides of a slice, or when it adds to what the output holds. So the faster form, which reads slices where they are
and writes or adds in place, is taken only for shapes and strides for which it was seen, on this machine and in this
process, to give the bits of the definition.
"""

from typing import Any

import torch
from torch import Tensor

# (shapes, strides, dtypes, alignment, add) -> whether the product in place has the bits of the definition.
_in_place_is_right: dict[tuple[Any, ...], bool] = {}


def product(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """out = a @ b, or out += a @ b: fp32 accumulation, rounded once to out's dtype, then added.

    a:       [m, k]; b: [k, n], of a's dtype; either may be a slice or transposed.
    out:     [m, n] of a's dtype or fp32; may be a slice of rows or columns.
    returns: out.
    """
    if not a.is_cuda:
        return _defined(a, b, out, add)
    key = (a.shape, b.shape[1], a.stride(), b.stride(), out.stride(), a.dtype, out.dtype, add, _alignment(a, b, out))
    right = _in_place_is_right.get(key)
    if right is None:
        right = _in_place_is_right[key] = _seen_to_be_right(a, b, out, add)
    return _in_place(a, b, out, add) if right else _defined(a, b, out, add)


def shown() -> dict[tuple[Any, ...], bool]:
    """For every kind of product so far, whether it was done in place; for reports and tests."""
    return dict(_in_place_is_right)


def _defined(a: Tensor, b: Tensor, out: Tensor, add: bool) -> Tensor:
    result = _multiplied(_without_gaps(a), _without_gaps(b), out.dtype)
    return out.add_(result) if add else out.copy_(result)


def _multiplied(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == a.dtype:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))


def _in_place(a: Tensor, b: Tensor, out: Tensor, add: bool) -> Tensor:
    mixed = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if add:
        return torch.addmm(out, a, b, out=out, **mixed)
    return torch.mm(a, b, out=out, **mixed)


def _without_gaps(matrix: Tensor) -> Tensor:
    """The same matrix with no gaps between rows, or columns where those are what memory holds together."""
    if matrix.stride(0) == 1 and matrix.stride(1) != 1:
        return matrix.t().contiguous().t()
    return matrix.contiguous()


def _alignment(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() % 16 for tensor in tensors)


def _seen_to_be_right(a: Tensor, b: Tensor, out: Tensor, add: bool) -> bool:
    """Try both forms on random numbers that lie in memory as these operands do, without touching `out`."""
    with torch.random.fork_rng(devices=[a.device]):
        torch.manual_seed(0)
        a, b, first, second = (_like(tensor).normal_() for tensor in (a, b, out, out))
    second.copy_(first)
    try:
        _in_place(a, b, first, add)
    except RuntimeError:  # a layout that the library does not take
        return False
    _defined(a, b, second, add)
    return torch.equal(first, second)


def _like(tensor: Tensor) -> Tensor:
    """Fresh memory with the strides and alignment of a matrix or a slice of one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    offset = tensor.data_ptr() % 16 // tensor.element_size()
    memory = torch.empty(offset + last + 1, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), offset)
