"""Add partials in tree order: neighbours, level by level, all in fp32, one rounding at the root.

    p0 ──┐
    p1 ──┴── p01 ──┐
    p2 ──┐         ├── root
    p3 ──┴── p23 ──┘

The Triton kernel and the plain torch beside it do the same additions in the same order, so a CPU and a GPU agree to
the last bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.launch import Kernel

BLOCK = 1024
WIDEST = 64  # partials that one launch adds; more take a launch for every factor of 64


def tree_add(partials: Tensor, out: Tensor, groups: int = 1) -> Tensor:
    """out[i] = the sum over r, in tree order, of partials[i, r], for each of the groups i.

    partials: [groups, R, …] fp32, contiguous, R a power of two; without the first dimension for one group.
    out:      [groups, …] fp32 or bf16, contiguous; the root is rounded to its dtype once.
    returns:  out.
    """
    if not (partials.is_contiguous() and out.is_contiguous()):
        raise ValueError("a tree adds partials that lie one after the other")
    width, rest = divmod(partials.numel(), out.numel())
    if rest or width & (width - 1):
        raise ValueError(f"a tree adds a power of two of partials, not {partials.numel() / out.numel():g}")
    if not partials.is_cuda:
        return _tree_add_torch(partials, out, groups)
    while width > WIDEST:
        nodes = partials.new_empty(partials.numel() // WIDEST)
        groups_of_64 = groups * width // WIDEST
        _tree_add_triton(partials, nodes, groups_of_64, WIDEST)
        partials, width = nodes, width // WIDEST
    _tree_add_triton(partials, out, groups, width)
    return out


def _tree_add_triton(partials: Tensor, out: Tensor, groups: int, width: int) -> None:
    size = out.numel() // groups
    block = BLOCK if width <= 8 else BLOCK // 8
    narrow = size <= block  # there may be more groups than programs along y
    grid = (groups, 1) if narrow else (-(-size // block), groups)
    KERNEL.launch(grid, (partials, out), (size,), (width, size % 16 == 0, narrow, block))


def _tree_add_torch(partials: Tensor, out: Tensor, groups: int) -> Tensor:
    partials = partials.view(groups, -1, out.numel() // groups)
    while partials.shape[1] > 1:
        partials = torch.add(*partials.unflatten(1, (-1, 2)).unbind(2))
    return out.copy_(partials.view(out.shape))


@triton.jit
def _tree(p, stride, mask, R: tl.constexpr):
    """Return the sum of R numbers in tree order, `stride` apart."""
    if R == 1:
        return tl.load(p, mask=mask)
    else:
        return _tree(p, stride, mask, R // 2) + _tree(p + R // 2 * stride, stride, mask, R // 2)


@triton.jit(do_not_specialize=["size"])
def _tree_add(partials, out, size, R: tl.constexpr, ALIGNED: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0 if NARROW else 1).to(tl.int64)
    stride = tl.cast(size, tl.int64)
    if ALIGNED:
        stride = tl.multiple_of(stride, 16)
    block = 0 if NARROW else tl.program_id(0)
    at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < stride
    p = partials + row * R * stride + at
    root = _tree(p, stride, mask, R)
    tl.store(out + row * stride + at, root.to(out.dtype.element_ty), mask=mask)


KERNEL = Kernel(_tree_add)
