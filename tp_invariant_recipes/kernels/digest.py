# SPDX-License-Identifier: Apache-2.0
"""Digest lanes: sums over a tensor's elements and positions, independent of how the tensor is divided.

A tensor is seen as a table of rows and columns: the last dimension, or all but the first two of an activation, are its
columns. With x the bits of an element as an unsigned integer, R odd numbers of 32 bits and C odd numbers of 64,

    lane = sum over rows r and columns c of   x[r, c] · R[r] · C[c]   modulo 2^64

R and C are pseudo-random functions of the row or column number in the whole tensor, different for each of the two
lanes. All sums are of integers, so the parts' lanes add up to the whole's in any order. A change of a single element
always changes the lanes: |x' - x| · R is less than 2^64 and not 0, and C can be divided out. Any other difference,
fixed before R and C are drawn, goes unseen with a probability of about 2^-62: within a column, one R in 2^31 can hide
it, and likewise in the other lane; C adds less than that. This is multilinear hashing (Lemire, Kaser, "Strongly
universal string hashing is fast", 2014), once over rows and once over columns. Elements of 8 bytes count as two words
of 4.

The Triton kernel reads every element once, does two multiplications of 32 by 32 bits for it, and is launched once for
all pieces of one width. On the way it can find the largest magnitude, which spares the exact gradient norm a pass, and
count the elements of fp32 master weights whose bf16 copy in the model is not their value rounded.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from tp_invariant_recipes.function_modes import outside_modes
from tp_invariant_recipes.kernels.cpu.cpu_threads import by_parts
from tp_invariant_recipes.kernels.grad_norm import largest
from tp_invariant_recipes.kernels.launch import TensorPart

LANES = 2
WITH_MAGNITUDE = (torch.float32, torch.bfloat16)
COPIED = (torch.float32, torch.bfloat16)  # of values and of their rounded copy, which follows from them
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
KERNELS = ((1, False), (2, False), (4, False), (4, True))  # bytes of an element, and whether it has a copy
ROWS = 64  # rows and columns that one program of the kernel reads
COLUMNS = 512
ROWS_AT_ONCE = 2
WARPS = 4
CHUNK = 1 << 20  # elements at a time on a CPU

SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0)  # the digits of pi


class Lanes:
    """Pieces whose lanes are taken again and again: what the kernel must know of them is prepared once.

    magnitude: also find, in the same pass, what kernels/grad_norm.py calls the largest: after a call `largest` is the
               bits of the largest |x| as fp32, int64 scalar. For fp32 and bf16.
    device:  of the lanes, if there are no pieces.
    After a call `unlike` is the number of elements of every piece that its copy does not hold rounded to the nearest
    (ties to even; any NaN is a copy of any NaN): int64 [pieces].
    ValueError: columns of a piece are not adjacent, there is no magnitude, or a copy of other types or another shape.
    Every call reads the memory anew.
    """

    def __init__(
        self, pieces: Sequence[TensorPart], *, magnitude: bool = False, device: torch.device | None = None
    ) -> None:
        self.magnitude = magnitude
        if magnitude and any(piece.values.dtype not in WITH_MAGNITUDE for piece in pieces):
            raise ValueError(f"magnitudes are found of {WITH_MAGNITUDE} only")
        for piece in pieces:
            _check_copy(piece)
        self._values = [piece.values for piece in pieces]
        self.pieces = [_as_words(piece) for piece in pieces]
        devices = {piece.values.device for piece in self.pieces}
        if len(devices) > 1:
            raise ValueError(f"pieces on several devices: {sorted(map(str, devices))}")
        self.device = devices.pop() if devices else device or torch.device("cpu")
        self.programs = {}
        if self.device.type == "cuda" and self.pieces:
            self.keys = keys(_length(self.pieces), self.device)
            for size, copied in KERNELS:
                rows = [
                    _row(n, piece)
                    for n, piece in enumerate(self.pieces)
                    if (piece.values.element_size(), piece.copy is not None) == (size, copied)
                ]
                self.programs[size, copied] = programs(rows, self.device)

    @outside_modes
    def __call__(self) -> Tensor:
        """Return the lanes of every piece: int64 [pieces, LANES] on their device; the host does not wait for it."""
        result = torch.zeros(len(self.pieces), LANES, dtype=torch.int64, device=self.device)
        self.largest = torch.zeros((), dtype=torch.int64, device=self.device)
        self.unlike = torch.zeros(len(self.pieces), dtype=torch.int64, device=self.device)
        for (size, copied), program in self.programs.items():
            most, unlike = self.largest if self.magnitude else None, self.unlike if copied else None
            launch(program, self.keys, result, size, most, unlike)
        if self.device.type != "cuda":
            for n, piece in enumerate(self.pieces):
                result[n] = _lanes_numpy(piece)
                if piece.copy is not None:
                    self.unlike[n] = _unlike(piece)
            if self.magnitude:
                self.largest = largest(self._values)
        return result


def lanes(pieces: Sequence[TensorPart]) -> Tensor:
    """Return the lanes of every piece, once: int64 [pieces, LANES]."""
    return Lanes(pieces)()


def row_digest(values: Tensor, first: int, size: int) -> Tensor:
    """Digest each row's bits: their sum, times the odd number of each column, modulo 2^64; int64 [rows].

    values: [rows, columns] fp32, the columns from `first` on of `size`. Digests of parts add up to the whole's.
    """
    columns = keys(size, values.device).columns[first : first + values.shape[1], 0]
    return ((values.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF) * columns).sum(-1)


class DigestKeys(NamedTuple):
    """R, int32 [n, LANES], and C, int64 [n, LANES], of the rows and columns numbered 0 … n - 1; all without a sign."""

    rows: Tensor
    columns: Tensor


def keys(length: int, device: torch.device) -> DigestKeys:
    """Return the keys of `length` rows and columns or more."""
    return _keys(1 << (max(length, 1) - 1).bit_length(), device)


@lru_cache(maxsize=4)
def _keys(length: int, device: torch.device) -> DigestKeys:
    numbers = np.arange(length, dtype=np.uint64)
    row, *columns = (splitmix(numbers + np.uint64(seed)) for seed in SEEDS)
    rows = np.stack([row & np.uint64(0xFFFFFFFF), row >> np.uint64(32)], 1).astype(np.uint32) | np.uint32(1)
    odd = np.stack(columns, 1) | np.uint64(1)
    return DigestKeys(torch.from_numpy(rows.view(np.int32)).to(device), torch.from_numpy(odd.view(np.int64)).to(device))


def splitmix(state: np.ndarray) -> np.ndarray:
    """SplitMix64 of each state (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014)."""
    z = state * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _check_copy(piece: TensorPart) -> None:
    values, copy = piece.values, piece.copy
    if copy is None:
        return
    if (values.dtype, copy.dtype) != COPIED or copy.shape != values.shape or copy.device != values.device:
        raise ValueError(f"{copy.dtype} {list(copy.shape)} is not a copy of {values.dtype} {list(values.shape)}")
    if copy.shape[1] > 1 and copy.stride(1) != 1:
        raise ValueError(f"a copy of stride {copy.stride()} has no adjacent columns")


def _as_words(piece: TensorPart) -> TensorPart:
    values = piece.values.detach()
    if values.dim() != 2 or (values.shape[1] > 1 and values.stride(1) != 1):
        raise ValueError(f"a piece of shape {tuple(values.shape)}, stride {values.stride()} has no adjacent columns")
    if values.element_size() == 8:
        return piece._replace(values=values.view(torch.int32), column=2 * piece.column)
    return piece._replace(values=values.view(WORDS[values.element_size()]))


def _length(pieces: Sequence[TensorPart]) -> int:
    return max(max(p.row + p.step * max(p.values.shape[0] - 1, 0), p.column + p.values.shape[1]) + 1 for p in pieces)


# --- NumPy, on a CPU ---


def _unlike(piece: TensorPart) -> int:
    """Return the number of elements that the copy does not hold, of a piece as words."""
    assert piece.copy is not None
    values, copy = piece.values.view(torch.float32), piece.copy.detach()
    height = max(1, CHUNK // max(values.shape[1], 1))
    unlike: list[int] = []

    def compare(first: int, last: int) -> None:
        rows = (slice(row, min(row + height, last)) for row in range(first, last, height))
        unlike.append(sum(_unlike_rows(values[at], copy[at]) for at in rows))

    by_parts(compare, len(values), pays=values.numel() > CHUNK)
    return sum(unlike)


def _unlike_rows(values: Tensor, copy: Tensor) -> int:
    bits, held = values.to(torch.bfloat16).view(torch.int16), copy.view(torch.int16)
    if torch.equal(bits, held):
        return 0
    return int(((bits != held) & ~(values.isnan() & copy.isnan())).sum())


def _lanes_numpy(piece: TensorPart) -> Tensor:
    values, row, column, step = piece[:4]
    rows, columns = values.shape
    of_rows, of_columns = keys(_length([piece]), values.device)
    factors = of_rows.numpy().view(np.uint32)[row::step][:rows].astype(np.uint64)
    across = of_columns.numpy().view(np.uint64)[column : column + columns]
    words = values.numpy().view(f"u{values.element_size()}")
    height = max(1, CHUNK // max(columns, 1))
    parts: list[NDArray[np.uint64]] = []

    def add(begin: int, end: int) -> None:
        sums = np.zeros((LANES, columns), np.uint64)
        for first in range(begin, end, height):
            at = slice(first, min(first + height, end))
            sums += np.einsum("rl,rc->lc", factors[at], words[at].astype(np.uint64))
        parts.append(sums)

    by_parts(add, rows, pays=values.numel() > CHUNK)
    sums = np.sum(parts, 0, dtype=np.uint64)
    return torch.from_numpy(np.einsum("lc,cl->l", sums, across).view(np.int64))


# --- Triton ---


def _row(number: int, piece: TensorPart) -> tuple[int, ...]:
    values = piece.values
    copy = (0, 0) if piece.copy is None else (piece.copy.data_ptr(), piece.copy.stride(0))
    return (values.data_ptr(), values.stride(0), *values.shape, piece.row, piece.step, piece.column, number, *copy)


def programs(rows: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the pieces, int64 [pieces, 10], and for every program of the kernel (piece, first row, first column),
    int32.
    """
    blocks = [
        np.stack(np.meshgrid(n, np.arange(0, row[2], ROWS), np.arange(0, row[3], COLUMNS), indexing="ij"), -1)
        for n, row in enumerate(rows)
    ]
    flat = np.concatenate([np.empty((0, 3)), *(block.reshape(-1, 3) for block in blocks)]).astype(np.int32)
    return torch.tensor(rows, dtype=torch.int64, device=device), torch.from_numpy(flat).to(device)


def launch(
    program: tuple[Tensor, Tensor],
    keys: DigestKeys,
    result: Tensor,
    size: int,
    largest: Tensor | None = None,
    unlike: Tensor | None = None,
) -> None:
    """Run the kernel alone, for pieces of elements of `size` bytes; also what Triton's interpreter runs on a CPU.

    result: int64 [pieces, LANES], added to. largest: int64 scalar, raised to the largest magnitude's bits.
    unlike: int64 [pieces], raised by the elements that the copies of these pieces do not hold; None: they have none.
    """
    pieces, blocks = program
    if len(blocks):
        with torch.cuda.device_of(result):  # of the tensors, which need not be the current one
            _lanes[(len(blocks),)](
                pieces, blocks, keys.rows, keys.columns, result, largest, unlike,
                size, ROWS, COLUMNS, ROWS_AT_ONCE, num_warps=WARPS,
            )  # fmt: skip


@triton.jit
def _lanes(
    pieces, blocks, row_keys, column_keys, result, largest, unlike,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROWS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    block = blocks + 3 * tl.program_id(0).to(tl.int64)
    piece = pieces + 10 * tl.load(block).to(tl.int64)
    first = tl.load(block + 1).to(tl.int64)
    before = tl.load(block + 2).to(tl.int64)
    stride, rows, columns = tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
    row, step, column, number = tl.load(piece + 4), tl.load(piece + 5), tl.load(piece + 6), tl.load(piece + 7)
    if SIZE == 4:
        p = tl.load(piece).to(tl.pointer_type(tl.uint32))
    elif SIZE == 2:
        p = tl.load(piece).to(tl.pointer_type(tl.uint16))
    else:
        p = tl.load(piece).to(tl.pointer_type(tl.uint8))
    p += first * stride + before
    if unlike is not None:
        copy_stride = tl.load(piece + 9)
        q = tl.load(piece + 8).to(tl.pointer_type(tl.uint16)) + first * copy_stride + before
        wrong = tl.zeros([COLUMNS], tl.int32)
    j = tl.arange(0, COLUMNS)
    key = row_keys.to(tl.pointer_type(tl.uint32)) + 2 * (row + first * step)
    there = j < columns - before
    sum0 = tl.zeros([COLUMNS], tl.uint64)
    sum1 = tl.zeros([COLUMNS], tl.uint64)
    most = tl.zeros([COLUMNS], tl.uint32)
    count = tl.minimum(ROWS, rows - first).to(tl.int32)
    for _ in range(count // ROWS_AT_ONCE):  # several rows at a time, so that enough bytes are on their way
        for i in tl.static_range(ROWS_AT_ONCE):
            bits = tl.load(p + i * stride + j, mask=there, other=0)
            if largest is not None:
                most = tl.maximum(most, _magnitude(bits, SIZE))
            if unlike is not None:
                wrong += _is_unlike(bits, tl.load(q + i * copy_stride + j, mask=there, other=0))
            x = bits.to(tl.uint64)
            sum0 += x * tl.load(key + 2 * i * step).to(tl.uint64)
            sum1 += x * tl.load(key + 2 * i * step + 1).to(tl.uint64)
        p += ROWS_AT_ONCE * stride
        if unlike is not None:
            q += ROWS_AT_ONCE * copy_stride
        key += 2 * ROWS_AT_ONCE * step
    for _ in range(count % ROWS_AT_ONCE):
        bits = tl.load(p + j, mask=there, other=0)
        if largest is not None:
            most = tl.maximum(most, _magnitude(bits, SIZE))
        if unlike is not None:
            wrong += _is_unlike(bits, tl.load(q + j, mask=there, other=0))
            q += copy_stride
        x = bits.to(tl.uint64)
        sum0 += x * tl.load(key).to(tl.uint64)
        sum1 += x * tl.load(key + 1).to(tl.uint64)
        p += stride
        key += 2 * step
    across = column_keys.to(tl.pointer_type(tl.uint64)) + 2 * (column + before + j)
    sum0 *= tl.load(across, mask=there, other=0)
    sum1 *= tl.load(across + 1, mask=there, other=0)
    tl.atomic_add(result + 2 * number, tl.sum(sum0, 0).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(result + 2 * number + 1, tl.sum(sum1, 0).to(tl.int64, bitcast=True), sem="relaxed")
    if largest is not None:
        tl.atomic_max(largest, tl.max(most, 0).to(tl.int64), sem="relaxed")
    if unlike is not None:
        count = tl.sum(wrong, 0)
        tl.atomic_add(unlike + number, count.to(tl.int64), mask=count > 0, sem="relaxed")


@triton.jit
def _magnitude(bits, SIZE: tl.constexpr):
    """Return the bits of |x| in fp32."""
    return (bits.to(tl.uint32) << (32 - 8 * SIZE)) & 0x7FFFFFFF


@triton.jit
def _is_unlike(bits, copy):
    """1 where the bf16 number `copy` is not the fp32 number `bits` rounded to the nearest, ties to even; else 0."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    kept = tl.where(nan, (copy.to(tl.uint32) & 0x7FFF) > 0x7F80, rounded == copy.to(tl.uint32))
    return tl.where(kept, 0, 1)
