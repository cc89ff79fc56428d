# SPDX-License-Identifier: Apache-2.0
"""The two passes of the exact gradient norm over all gradients: the largest magnitude, and the sum of squares.

    g = m · 2^x       x the exponent of the last bit, |m| < 2^24; subnormals have the x of the smallest normal numbers
    q = floor((m · 2^7)² · 2^(-2 · (X - x)))       X the largest x of all gradients; q < 2^62

    bit   95            64 63            32 31             0
    q                     |    30 bits    |    32 bits    |
    sum    |   limb 2     |    limb 1     |    limb 0     |     each limb has 64 bits, so that limbs can be summed

All arithmetic is on integers: nothing rounds, and the order does not matter. Nothing overflows. A piece of the
gradients has at most 2^24 elements, so its low halves sum to less than 2^56 and its high halves to less than 2^54; it
keeps 32 bits of each sum and carries the rest into the next limb. The sum over up to 2^31 pieces, on all ranks
together, is below 2^63.

One launch of each Triton kernel covers all tensors, and the host does not wait for the GPU.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1 << 16  # elements of one program of a kernel; also of plain torch on a CPU at a time, for its cache
# Elements that a program of each kernel reads at a time, and its warps. With these both read 4.3 TB/s on an H200. With
# the first pair the second kernel reads 3.4 TB/s.
LARGEST_BLOCK, LARGEST_WARPS = 2048, 8
SQUARES_BLOCK, SQUARES_WARPS = 512, 4
PIECE = 1 << 24  # elements at a time in plain torch on a GPU: about six temporaries of 8 bytes each
TABLES = 4  # cached tables of chunks
LIMBS = 3
LIMB = 32

_WORD = (1 << LIMB) - 1
_MAGNITUDE = 0x7FFFFFFF


def largest(grads: Sequence[Tensor]) -> Tensor:
    """Return the bits of the largest |g| as fp32.

    The bits have the order of the numbers, and every NaN is larger than inf.

    grads:   on one device, of any shape; fp32, or a dtype that `.float()` converts exactly.
    returns: int64 scalar on that device, 0 if there is no element; the host does not wait for it.
    """
    for_kernel, others = _split(grads)
    result = torch.zeros((), dtype=torch.int64, device=_device(grads))
    for piece in _pieces(others):
        result = torch.maximum(result, _bits(piece).max())
    if for_kernel:
        launch_largest(_table(_spans(for_kernel), result.device), result)
    return result


def square_limbs(grads: Sequence[Tensor], largest: Tensor) -> Tensor:
    """Return the sum of q in LIMBS limbs of LIMB bits, lowest first. Each int64 has room to sum limbs.

    grads:   as for the function `largest`.
    largest: the result of `largest`, on the same device, or a larger value: the maximum over all ranks.
    returns: int64 [LIMBS] on that device; meaningless if `largest` is not finite.
    """
    for_kernel, others = _split(grads)
    result = torch.zeros(LIMBS, dtype=torch.int64, device=_device(grads))
    for piece in _pieces(others):
        result += _square_limbs_torch(piece, largest)
    if for_kernel:
        launch_square_limbs(_table(_spans(for_kernel), result.device), largest, result)
    return result


def _split(grads: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Flat gradients: those for the kernels, and the others for plain torch."""
    flat = [grad.detach().reshape(-1) for grad in grads if grad.numel()]
    return [grad for grad in flat if _has_kernel(grad)], [grad for grad in flat if not _has_kernel(grad)]


def _has_kernel(grad: Tensor) -> bool:
    return grad.is_cuda and grad.dtype == torch.float32


def _device(grads: Sequence[Tensor]) -> torch.device:
    devices = {grad.device for grad in grads}
    if len(devices) > 1:
        raise ValueError(f"gradients on several devices: {sorted(map(str, devices))}")
    return devices.pop() if devices else torch.device("cpu")


# --- plain torch ---


def _pieces(grads: Sequence[Tensor]) -> list[Tensor]:
    """Of at most PIECE elements each; on a CPU of about CHUNK, with small gradients side by side."""
    pieces = [piece for grad in grads for piece in grad.split(PIECE if grad.is_cuda else CHUNK)]
    if not pieces or pieces[0].is_cuda:
        return pieces
    groups: list[list[Tensor]] = []
    room = 0
    for piece in pieces:
        room -= len(piece)
        if room < 0:
            groups.append([])
            room = CHUNK - len(piece)
        groups[-1].append(piece)
    return [group[0] if len(group) == 1 else torch.cat([piece.float() for piece in group]) for group in groups]


def _bits(piece: Tensor) -> Tensor:
    """Return the bits of |g| in fp32 as int32, which no flushing of subnormals changes."""
    return piece.float().view(torch.int32) & _MAGNITUDE


def _place(bits: Tensor) -> Tensor:
    """x + 149: the exponent field less one, and 0 for subnormals as for the smallest normal numbers."""
    return ((bits >> 23) - 1).clamp_(min=0)


def _square_limbs_torch(piece: Tensor, largest: Tensor) -> Tensor:
    top = 0 if piece.is_cuda else int(largest) >> 23
    if 31 < top < 255:  # no subnormal counts, which a CPU may flush
        q = piece.double().mul_(math.ldexp(1.0, 157 - top))  # exact in fp64, and so is the square
        q = q.mul_(q).to(torch.int64)
    else:
        bits = _bits(piece)
        x = _place(bits)
        down = (_place(largest) - x).clamp_(max=31).mul_(2)
        m = bits - (x << 23)  # the rest of the exponent field is the leading bit of normal numbers
        q = m.to(torch.int64).bitwise_left_shift_(7)
        q = q.mul_(q).bitwise_right_shift_(down.to(torch.int64))
    low = (q & _WORD).sum()
    high = q.bitwise_right_shift_(LIMB).sum() + (low >> LIMB)
    return torch.stack((low & _WORD, high & _WORD, high >> LIMB))


# --- Triton ---


def _spans(grads: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((grad.data_ptr(), grad.numel()) for grad in grads)


@lru_cache(maxsize=TABLES)  # training has the same buffers at every step; a table depends only on its key
def _table(spans: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """(address, number of elements) of every chunk: int64 [chunks, 2] on the device."""
    rows = [
        (address + 4 * start, min(CHUNK, count - start)) for address, count in spans for start in range(0, count, CHUNK)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def launch_largest(table: Tensor, result: Tensor) -> None:
    """Launch the kernel of `largest` alone; Triton's interpreter can run it on a CPU. result: int64, initially zero."""
    _launch(_largest, table, result, BLOCK=LARGEST_BLOCK, num_warps=LARGEST_WARPS)


def launch_square_limbs(table: Tensor, largest: Tensor, result: Tensor) -> None:
    """Launch the kernel of `square_limbs` alone, as above. result: int64 [LIMBS]; the kernel adds to it."""
    _launch(_square_limbs, table, largest, result, BLOCK=SQUARES_BLOCK, num_warps=SQUARES_WARPS)


def _launch(kernel: Callable, table: Tensor, *arguments: Tensor, **options: int) -> None:
    with torch.cuda.device_of(table):  # the tensors' device need not be the current one
        kernel[(len(table),)](table, *arguments, **options)  # type: ignore[index]


@triton.jit
def _chunk(table):
    row = table + 2 * tl.program_id(0).to(tl.int64)
    return tl.load(row).to(tl.pointer_type(tl.int32)), tl.load(row + 1).to(tl.int32)


@triton.jit
def _bits_at(p, start, count, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    return tl.load(p + at, mask=at < count, other=0) if MASKED else tl.load(p + at)


@triton.jit
def _largest(table, result, BLOCK: tl.constexpr):
    p, count = _chunk(table)
    most = tl.zeros([BLOCK], tl.int32)
    whole = count // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        most = tl.maximum(most, _bits_at(p, start, count, False, BLOCK) & 0x7FFFFFFF)
    if whole < count:
        most = tl.maximum(most, _bits_at(p, whole, count, True, BLOCK) & 0x7FFFFFFF)
    tl.atomic_max(result, tl.max(most, 0).to(tl.int64), sem="relaxed")


@triton.jit
def _q(bits, top):
    """Of the bits of fp32 numbers. top: the exponent field of the largest, at least 1."""
    field = tl.maximum((bits >> 23) & 0xFF, 1)
    # In 32 bits a shift by 7 loses the sign and leaves two bits of the field, which the subtraction takes away.
    a = ((bits << 7) - (field << 30) + (1 << 30)).to(tl.uint32).to(tl.uint64)
    return (a * a) >> tl.minimum(2 * (top - field), 62).to(tl.uint64)


@triton.jit
def _square_limbs(table, largest, result, BLOCK: tl.constexpr):
    p, count = _chunk(table)
    top = tl.maximum((tl.load(largest) >> 23).to(tl.int32), 1)
    lows = tl.zeros([BLOCK], tl.uint64)
    highs = tl.zeros([BLOCK], tl.uint64)
    whole = count // (4 * BLOCK) * (4 * BLOCK)
    for start in range(0, whole, 4 * BLOCK):  # four q fit in 64 bits: half of the additions
        q = _q(_bits_at(p, start, count, False, BLOCK), top)
        q += _q(_bits_at(p, start + BLOCK, count, False, BLOCK), top)
        q += _q(_bits_at(p, start + 2 * BLOCK, count, False, BLOCK), top)
        q += _q(_bits_at(p, start + 3 * BLOCK, count, False, BLOCK), top)
        lows += q & 0xFFFFFFFF
        highs += q >> 32
    for start in range(whole, count, BLOCK):
        q = _q(_bits_at(p, start, count, True, BLOCK), top)
        lows += q & 0xFFFFFFFF
        highs += q >> 32
    low = tl.sum(lows, 0).to(tl.int64)
    high = tl.sum(highs, 0).to(tl.int64) + (low >> 32)
    tl.atomic_add(result, low & 0xFFFFFFFF, sem="relaxed")
    tl.atomic_add(result + 1, high & 0xFFFFFFFF, sem="relaxed")
    tl.atomic_add(result + 2, high >> 32, sem="relaxed")
