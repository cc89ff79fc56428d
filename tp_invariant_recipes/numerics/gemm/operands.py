# SPDX-License-Identifier: Apache-2.0
"""How the operands of a GEMM are cut into shards, and laid out for a GEMM of one shard."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> integers of as many
Split = int | tuple[int, ...]  # a number of equal parts, or the size of each


def parts_of(matrix: Tensor, parts: Split, dim: int) -> Sequence[Tensor]:
    """Return views of the parts, in order."""
    return matrix.chunk(parts, dim) if isinstance(parts, int) else matrix.split(parts, dim)


def every_part(segments: Sequence[int], shards: int) -> list[list[slice]]:
    """For each shard its part of every segment of k, in order."""
    starts = list(itertools.accumulate(segments, initial=0))
    return [
        [slice(s + size // shards * n, s + size // shards * (n + 1)) for s, size in zip(starts, segments, strict=False)]
        for n in range(shards)
    ]


def along_k(a: Tensor, b: Tensor, start: int, size: int, step: int, count: int) -> tuple[Tensor, Tensor]:
    """Return views [count, m, size] of a, [m, k], and [count, size, n] of b, [k, n]: a part of k every `step`."""
    (rows, along), (across, columns) = a.stride(), b.stride()
    return (
        a.as_strided((count, a.shape[0], size), (step * along, rows, along), a.storage_offset() + start * along),
        b.as_strided((count, size, b.shape[1]), (step * across, across, columns), b.storage_offset() + start * across),
    )


def without_gaps(matrix: Tensor) -> Tensor:
    """Return the matrix with no gaps between rows, or columns where those are what memory holds together.

    It begins where 16 bytes do, as memory of its own does: a library may choose by that as well (MKL's gemv does).
    """
    if matrix.stride(0) == 1 and matrix.stride(1) != 1:
        return without_gaps(matrix.t()).t()
    return dense(matrix)


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor with no gaps, in the order of its dimensions, beginning where 16 bytes do."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def like(tensor: Tensor, alignment: int) -> Tensor:
    """Fresh memory with the strides of a tensor or a slice of one, and its place between multiples of `alignment`."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    offset = tensor.data_ptr() % alignment // tensor.element_size()
    memory = tensor.new_empty(offset + last + 1)
    return memory.as_strided(tensor.shape, tensor.stride(), offset)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits."""
    words = WORDS[a.element_size()]
    return torch.equal(a.view(words), b.view(words))
