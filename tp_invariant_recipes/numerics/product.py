"""Matrix products on the shape of one virtual shard: same shape and strides for every t, so the same bits."""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b with fp32 accumulation and one rounding to `dtype`.

    a: [m, k], b: [k, n], of one dtype. Operands are laid out afresh: a library may choose its algorithm by strides, and
    the strides of a slice depend on how much of the matrix this rank holds.
    returns: [m, n] of `dtype`.
    """
    a, b = a.contiguous(), b.contiguous()
    if dtype == a.dtype:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))
