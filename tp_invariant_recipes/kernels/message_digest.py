# SPDX-License-Identifier: Apache-2.0
"""Digests of messages: a sum modulo 2^64 over a message's words and their positions, added to a table.

A message is its words of 4, 2 or 1 bytes, seen as a table of COLUMNS columns. Its digest is the first lane of
kernels/digest.py, times an odd number that depends on the number of the message among those of a step. Sums of such
digests do not depend on the order in which messages arrive, and two messages that change places change the sum.

The Triton kernel reads every word once. It computes the keys, and needs nothing from the host, so that a CUDA graph
may hold it.
"""

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.digest import SEEDS, WORDS, keys, splitmix
from tp_invariant_recipes.kernels.launch import Kernel, alignment

COLUMNS = 1024  # of a message as a table
ROWS = 8  # of it that one program reads


def words(messages: Tensor) -> Tensor:
    """Return messages of any dtype, [messages, …] without gaps, as words, [messages, n]."""
    if not messages.numel():
        return messages.new_empty(messages.shape[0], 0, dtype=torch.uint8)
    flat = messages.detach().reshape(messages.shape[0], -1).view(torch.uint8)
    size = next(size for size in (4, 2, 1) if flat.shape[1] % size == 0)
    if flat.data_ptr() % size or flat.storage_offset() % size:
        flat = flat.clone()
    return flat.view(WORDS[size])


def add_digests(messages: Tensor, table: Tensor, slot: int, number: int) -> None:
    """Add the digest of message i to `table[slot + i]`; the host does not wait for it.

    messages: [messages, n] words. table: int64, on the same device. number: of the messages, in a step.
    """
    if not messages.shape[1]:
        return
    if messages.is_cuda:
        grid = triton.cdiv(messages.shape[1], ROWS * COLUMNS), messages.shape[0]
        numbers = (messages.shape[1], messages.stride(0), slot, number)
        constants = (messages.element_size(), alignment(messages.stride(0)), SEEDS, ROWS, COLUMNS)
        KERNEL.launch(grid, (messages, table), numbers, constants)
        return
    count, n = messages.shape
    height = -(-n // COLUMNS)
    of = keys(max(height, COLUMNS), messages.device)
    rows = of.rows.numpy().view(np.uint32)[:height, 0].astype(np.uint64)
    columns = of.columns.numpy().view(np.uint64)[:COLUMNS, 0]
    padded = np.zeros((count, height * COLUMNS), np.uint64)
    padded[:, :n] = messages.numpy().view(f"u{messages.element_size()}")
    sums = np.einsum("r,mrc->mc", rows, padded.reshape(count, height, COLUMNS)) * columns
    table[slot : slot + count] += torch.from_numpy(sums.sum(1).view(np.int64)).to(table.device) * factor(number)


@lru_cache(maxsize=1 << 16)
def factor(number: int) -> int:
    """Return the odd number that stands for the number of a message, as int64."""
    return int((splitmix(np.array([number + SEEDS[2]], np.uint64)) | np.uint64(1)).view(np.int64)[0])


@triton.jit
def _splitmix(state):
    z = state * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["n", "stride", "slot", "number"])
def _message_digests(
    messages, table, n, stride, slot, number,
    SIZE: tl.constexpr, ALIGNMENT: tl.constexpr, SEEDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    message = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    at = row[:, None] * COLUMNS + column[None, :]
    messages += tl.multiple_of(message * stride, ALIGNMENT)
    if (tl.program_id(0).to(tl.int64) + 1) * ROWS * COLUMNS <= n:  # without a mask 16 bytes are read at once
        bits = tl.load(messages + at)
    else:
        bits = tl.load(messages + at, mask=at < n, other=0)
    if SIZE == 4:
        x = bits.to(tl.uint32, bitcast=True).to(tl.uint64)
    elif SIZE == 2:
        x = bits.to(tl.uint16, bitcast=True).to(tl.uint64)
    else:
        x = bits.to(tl.uint64)
    rows = (_splitmix(row.to(tl.uint64) + SEEDS[0]) & 0xFFFFFFFF) | 1
    columns = _splitmix(column.to(tl.uint64) + SEEDS[1]) | 1
    total = tl.sum(tl.sum(x * rows[:, None], 0) * columns, 0)
    total *= _splitmix(number.to(tl.uint64) + SEEDS[2]) | 1
    tl.atomic_add(table + slot + message, total.to(tl.int64, bitcast=True), sem="relaxed")


KERNEL = Kernel(_message_digests)
