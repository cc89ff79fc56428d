# SPDX-License-Identifier: Apache-2.0
"""Add partials in tree order: neighbours, level by level, all in fp32, one rounding at the root.

    p0 ──┐
    p1 ──┴── p01 ──┐
    p2 ──┐         ├── root
    p3 ──┴── p23 ──┘

The Triton kernel and the plain torch beside it do the same additions in the same order, so a CPU and a GPU agree to
the last bit.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.launch import Kernel

MOST = 8  # buffers of a launch
BLOCK = 1024


def peer_add(partials: Sequence[Tensor], out: Tensor) -> Tensor:
    """out = the sum of the partials in tree order.

    partials: 2, 4 or 8 of fp32, each contiguous and of out's size.
    out:      fp32 or bf16, contiguous; the root is rounded to its dtype once. returns: out.
    raises ValueError: another number of partials, gaps or other sizes.
    """
    if len(partials) not in (2, 4, MOST):
        raise ValueError(f"a launch adds 2, 4 or {MOST} partials, not {len(partials)}")
    if any(not x.is_contiguous() or x.numel() != out.numel() for x in (*partials, out)):
        raise ValueError("partials and their sum have one size and no gaps")
    size = out.numel()
    pointers = (*partials, *[partials[0]] * (MOST - len(partials)))
    PEER_ADD.launch((-(-size // BLOCK), 1), (*pointers, out), (size,), (len(partials), size % 16 == 0, BLOCK))
    return out


@triton.jit(do_not_specialize=["size"])
def _peer_add(
    p0, p1, p2, p3, p4, p5, p6, p7, out, size, R: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    whole = tl.cast(size, tl.int64)
    if ALIGNED:
        whole = tl.multiple_of(whole, 16)
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < whole
    root = tl.load(p0 + at, mask=mask) + tl.load(p1 + at, mask=mask)
    if R >= 4:
        root += tl.load(p2 + at, mask=mask) + tl.load(p3 + at, mask=mask)
    if R == 8:
        lower = tl.load(p4 + at, mask=mask) + tl.load(p5 + at, mask=mask)
        root += lower + (tl.load(p6 + at, mask=mask) + tl.load(p7 + at, mask=mask))
    tl.store(out + at, root.to(out.dtype.element_ty), mask=mask)


PEER_ADD = Kernel(_peer_add)


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
    nodes = partials.view(-1, out.numel() // groups).numpy()  # whose calls take less of the host
    while len(nodes) > groups:
        nodes = nodes[::2] + nodes[1::2]
    return out.copy_(torch.from_numpy(nodes).view(out.shape))


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
