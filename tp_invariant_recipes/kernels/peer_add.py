"""Add partials that lie in several buffers in the order of kernels/tree_add.py."""

from collections.abc import Sequence

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
    KERNEL.launch((-(-size // BLOCK), 1), (*pointers, out), (size,), (len(partials), size % 16 == 0, BLOCK))
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


KERNEL = Kernel(_peer_add)
