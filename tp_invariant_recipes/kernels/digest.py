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
all pieces of one width. On the way it can find the largest magnitude, which spares the exact gradient norm a pass.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.host.function_modes import outside_modes
from tp_invariant_recipes.kernels.grad_norm import largest

LANES = 2
WITH_MAGNITUDE = (torch.float32, torch.bfloat16)
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
ROWS = 64  # rows and columns that one program of the kernel reads
COLUMNS = 512
TOGETHER = 2
WARPS = 4
CHUNK = 1 << 20  # elements at a time in NumPy

_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0)  # the digits of pi


class Piece(NamedTuple):
    """A part of a table. Its row i is row `row + i · step` of the whole, its column j is column `column + j`.

    values: [rows, columns], columns adjacent in memory.
    """

    values: Tensor
    row: int
    column: int
    step: int = 1


class Lanes:
    """Pieces whose lanes are taken again and again: what the kernel must know of them is prepared once.

    magnitude: also find, in the same pass, what kernels/grad_norm.py calls the largest: after a call `largest` is the
               bits of the largest |x| as fp32, int64 scalar. For fp32 and bf16.
    ValueError: columns of a piece are not adjacent, or there is no magnitude. Every call reads the memory anew.
    """

    def __init__(self, pieces: Sequence[Piece], *, magnitude: bool = False) -> None:
        self.magnitude = magnitude
        if magnitude and any(piece.values.dtype not in WITH_MAGNITUDE for piece in pieces):
            raise ValueError(f"magnitudes are found of {WITH_MAGNITUDE} only")
        self._values = [piece.values for piece in pieces]
        self.pieces = [_as_words(piece) for piece in pieces]
        devices = {piece.values.device for piece in self.pieces}
        if len(devices) > 1:
            raise ValueError(f"pieces on several devices: {sorted(map(str, devices))}")
        self.device = devices.pop() if devices else torch.device("cpu")
        self.programs = {}
        if self.device.type == "cuda":
            self.keys = keys(_length(self.pieces), self.device)
            for size in WORDS:
                rows = [_row(n, piece) for n, piece in enumerate(self.pieces) if piece.values.element_size() == size]
                self.programs[size] = programs(rows, self.device)

    @outside_modes
    def __call__(self) -> Tensor:
        """The lanes of every piece: int64 [pieces, LANES] on their device; the host does not wait for it."""
        result = torch.zeros(len(self.pieces), LANES, dtype=torch.int64, device=self.device)
        self.largest = torch.zeros((), dtype=torch.int64, device=self.device)
        for size, some in self.programs.items():
            launch(some, self.keys, result, size, self.largest if self.magnitude else None)
        if not self.programs:
            for n, piece in enumerate(self.pieces):
                result[n] = _lanes_numpy(piece)
            if self.magnitude:
                self.largest = largest(self._values)
        return result


def lanes(pieces: Sequence[Piece]) -> Tensor:
    """The lanes of every piece, once: int64 [pieces, LANES]."""
    return Lanes(pieces)()


class Keys(NamedTuple):
    """R, int32 [n, LANES], and C, int64 [n, LANES], of the rows and columns numbered 0 … n - 1; all without a sign."""

    rows: Tensor
    columns: Tensor


def keys(length: int, device: torch.device) -> Keys:
    """The keys of `length` rows and columns or more."""
    return _keys(1 << (max(length, 1) - 1).bit_length(), device)


@lru_cache(maxsize=4)
def _keys(length: int, device: torch.device) -> Keys:
    numbers = np.arange(length, dtype=np.uint64)
    row, *columns = (_splitmix(numbers + np.uint64(seed)) for seed in _SEEDS)
    rows = np.stack([row & np.uint64(0xFFFFFFFF), row >> np.uint64(32)], 1).astype(np.uint32) | np.uint32(1)
    odd = np.stack(columns, 1) | np.uint64(1)
    return Keys(torch.from_numpy(rows.view(np.int32)).to(device), torch.from_numpy(odd.view(np.int64)).to(device))


def _splitmix(state: np.ndarray) -> np.ndarray:
    """SplitMix64 of each state (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014)."""
    z = state * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _as_words(piece: Piece) -> Piece:
    values = piece.values.detach()
    if values.dim() != 2 or (values.shape[1] > 1 and values.stride(1) != 1):
        raise ValueError(f"a piece of shape {tuple(values.shape)}, stride {values.stride()} has no adjacent columns")
    if values.element_size() == 8:
        return piece._replace(values=values.view(torch.int32), column=2 * piece.column)
    return piece._replace(values=values.view(WORDS[values.element_size()]))


def _length(pieces: Sequence[Piece]) -> int:
    return max(max(p.row + p.step * max(p.values.shape[0] - 1, 0), p.column + p.values.shape[1]) + 1 for p in pieces)


# --- NumPy, on a CPU ---


def _lanes_numpy(piece: Piece) -> Tensor:
    values, row, column, step = piece
    rows, columns = values.shape
    of_rows, of_columns = keys(_length([piece]), values.device)
    factors = of_rows.numpy().view(np.uint32)[row::step][:rows].astype(np.uint64)
    across = of_columns.numpy().view(np.uint64)[column : column + columns]
    words = values.numpy().view(f"u{values.element_size()}")
    sums = np.zeros((LANES, columns), np.uint64)
    together = max(1, CHUNK // max(columns, 1))
    for first in range(0, rows, together):
        bits = words[first : first + together].astype(np.uint64)
        sums += np.einsum("rl,rc->lc", factors[first : first + together], bits)
    return torch.from_numpy(np.einsum("lc,cl->l", sums, across).view(np.int64))


# --- Triton ---


def _row(number: int, piece: Piece) -> tuple[int, ...]:
    values = piece.values
    return (values.data_ptr(), values.stride(0), *values.shape, piece.row, piece.step, piece.column, number)


def programs(rows: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The pieces, int64 [pieces, 8], and for every program of the kernel (piece, first row, first column), int32."""
    blocks = [
        np.stack(np.meshgrid(n, np.arange(0, row[2], ROWS), np.arange(0, row[3], COLUMNS), indexing="ij"), -1)
        for n, row in enumerate(rows)
    ]
    flat = np.concatenate([np.empty((0, 3)), *(block.reshape(-1, 3) for block in blocks)]).astype(np.int32)
    return torch.tensor(rows, dtype=torch.int64, device=device), torch.from_numpy(flat).to(device)


def launch(some: tuple[Tensor, Tensor], of: Keys, result: Tensor, size: int, largest: Tensor | None = None) -> None:
    """The kernel alone, for pieces of elements of `size` bytes; also what Triton's interpreter runs on a CPU.

    result: int64 [pieces, LANES], added to. largest: int64 scalar, raised to the largest magnitude's bits.
    """
    pieces, blocks = some
    if len(blocks):
        with torch.cuda.device_of(result):  # of the tensors, which need not be the current one
            _lanes[(len(blocks),)](
                pieces, blocks, of.rows, of.columns, result, largest, size, ROWS, COLUMNS, TOGETHER, num_warps=WARPS
            )


@triton.jit
def _lanes(
    pieces, blocks, row_keys, column_keys, result, largest,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    block = blocks + 3 * tl.program_id(0).to(tl.int64)
    piece = pieces + 8 * tl.load(block).to(tl.int64)
    first = tl.load(block + 1).to(tl.int64)
    left = tl.load(block + 2).to(tl.int64)
    stride, rows, columns = tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
    row, step, column, number = tl.load(piece + 4), tl.load(piece + 5), tl.load(piece + 6), tl.load(piece + 7)
    if SIZE == 4:
        p = tl.load(piece).to(tl.pointer_type(tl.uint32))
    elif SIZE == 2:
        p = tl.load(piece).to(tl.pointer_type(tl.uint16))
    else:
        p = tl.load(piece).to(tl.pointer_type(tl.uint8))
    p += first * stride + left
    j = tl.arange(0, COLUMNS)
    key = row_keys.to(tl.pointer_type(tl.uint32)) + 2 * (row + first * step)
    there = j < columns - left
    sum0 = tl.zeros([COLUMNS], tl.uint64)
    sum1 = tl.zeros([COLUMNS], tl.uint64)
    most = tl.zeros([COLUMNS], tl.uint32)
    count = tl.minimum(ROWS, rows - first).to(tl.int32)
    for _ in range(count // TOGETHER):  # several rows at a time, so that enough bytes are on their way
        for i in tl.static_range(TOGETHER):
            bits = tl.load(p + i * stride + j, mask=there, other=0)
            if largest is not None:
                most = tl.maximum(most, _magnitude(bits, SIZE))
            x = bits.to(tl.uint64)
            sum0 += x * tl.load(key + 2 * i * step).to(tl.uint64)
            sum1 += x * tl.load(key + 2 * i * step + 1).to(tl.uint64)
        p += TOGETHER * stride
        key += 2 * TOGETHER * step
    for _ in range(count % TOGETHER):
        bits = tl.load(p + j, mask=there, other=0)
        if largest is not None:
            most = tl.maximum(most, _magnitude(bits, SIZE))
        x = bits.to(tl.uint64)
        sum0 += x * tl.load(key).to(tl.uint64)
        sum1 += x * tl.load(key + 1).to(tl.uint64)
        p += stride
        key += 2 * step
    across = column_keys.to(tl.pointer_type(tl.uint64)) + 2 * (column + left + j)
    sum0 *= tl.load(across, mask=there, other=0)
    sum1 *= tl.load(across + 1, mask=there, other=0)
    tl.atomic_add(result + 2 * number, tl.sum(sum0, 0).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(result + 2 * number + 1, tl.sum(sum1, 0).to(tl.int64, bitcast=True), sem="relaxed")
    if largest is not None:
        tl.atomic_max(largest, tl.max(most, 0).to(tl.int64), sem="relaxed")


@triton.jit
def _magnitude(bits, SIZE: tl.constexpr):
    """The bits of |x| in fp32."""
    return (bits.to(tl.uint32) << (32 - 8 * SIZE)) & 0x7FFFFFFF
