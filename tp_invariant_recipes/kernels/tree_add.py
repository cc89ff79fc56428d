"""Add partials in tree order: neighbours, level by level, all in fp32, one rounding at the root.

    p0 ──┐
    p1 ──┴── p01 ──┐
    p2 ──┐         ├── root
    p3 ──┴── p23 ──┘

The Triton kernel and the plain torch beside it do the same additions in the same order, so a CPU and a GPU agree to
the last bit.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
WIDEST = 64  # partials that one launch adds; more take a launch for every factor of 64


def tree_add(partials: Tensor, out: Tensor, *, accumulate: bool = False) -> Tensor:
    """out[i, :] = (or +=) the sum over r, in tree order, of partials[i, r, :].

    partials:   [n, R, size] fp32, R a power of two, the last two dimensions contiguous.
    out:        [n, size] fp32 or bf16, contiguous; the root is rounded to its dtype once.
    accumulate: add the root to what `out` holds, one more fp32 addition.
    returns:    out.
    """
    n, width, size = partials.shape
    if width & (width - 1) or not width:
        raise ValueError(f"a tree adds a power of two of partials, not {width}")
    if not partials.is_cuda:
        return _tree_add_torch(partials, out, accumulate)
    while width > WIDEST:
        nodes = partials.new_empty(n, width // WIDEST, size)
        tree_add(partials.view(-1, WIDEST, size), nodes.view(-1, size))
        partials, width = nodes, width // WIDEST
    _tree_add_triton(partials, out, accumulate)
    return out


def _tree_add_triton(partials: Tensor, out: Tensor, accumulate: bool) -> None:
    n, width, size = partials.shape
    block = BLOCK if width <= 8 else BLOCK // 8
    grid = (triton.cdiv(size, block), n)
    _tree_add[grid](partials, out, size, R=width, ACCUMULATE=accumulate, ALIGNED=size % 16 == 0, BLOCK=block)


def _tree_add_torch(partials: Tensor, out: Tensor, accumulate: bool) -> Tensor:
    while partials.shape[1] > 1:
        partials = partials[:, 0::2] + partials[:, 1::2]
    return out.add_(partials[:, 0]) if accumulate else out.copy_(partials[:, 0])


@triton.jit
def _two(p, stride, mask):
    return tl.load(p, mask=mask) + tl.load(p + stride, mask=mask)


@triton.jit
def _four(p, stride, mask):
    return _two(p, stride, mask) + _two(p + 2 * stride, stride, mask)


@triton.jit
def _eight(p, stride, mask):
    return _four(p, stride, mask) + _four(p + 4 * stride, stride, mask)


@triton.jit
def _sixteen(p, stride, mask):
    return _eight(p, stride, mask) + _eight(p + 8 * stride, stride, mask)


@triton.jit
def _thirty_two(p, stride, mask):
    return _sixteen(p, stride, mask) + _sixteen(p + 16 * stride, stride, mask)


@triton.jit
def _sixty_four(p, stride, mask):
    return _thirty_two(p, stride, mask) + _thirty_two(p + 32 * stride, stride, mask)


@triton.jit(do_not_specialize=["size"])
def _tree_add(
    partials, out, size, R: tl.constexpr, ACCUMULATE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    stride = tl.cast(size, tl.int64)
    if ALIGNED:
        stride = tl.multiple_of(stride, 16)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < stride
    p = partials + row * R * stride + at
    if R == 1:
        root = tl.load(p, mask=mask)
    elif R == 2:
        root = _two(p, stride, mask)
    elif R == 4:
        root = _four(p, stride, mask)
    elif R == 8:
        root = _eight(p, stride, mask)
    elif R == 16:
        root = _sixteen(p, stride, mask)
    elif R == 32:
        root = _thirty_two(p, stride, mask)
    else:
        root = _sixty_four(p, stride, mask)
    o = out + row * stride + at
    if ACCUMULATE:
        root += tl.load(o, mask=mask)
    tl.store(o, root.to(out.dtype.element_ty), mask=mask)
