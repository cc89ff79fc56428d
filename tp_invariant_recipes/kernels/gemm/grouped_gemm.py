# SPDX-License-Identifier: Apache-2.0
"""Products of the rows of many experts, each with its expert's weight, in one launch.

As in kernels/gemm/fixed_tile_gemm.py one program computes one tile, always with the same instructions over k in
order. So the bits of a row of `out` depend only on that row of the operand and on its expert's weight. The bits of a
weight gradient depend only on the expert's own rows, in order. They are independent of the number of experts, the
number of rows and the expert's position.

The weights of a layer are separate tensors anywhere in memory: the kernels get the first one and the others' offsets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import batched

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.launch import Kernel

# dtype of the operands -> tile of the output, step of the sum, warps. They are part of the definition of the bits.
TILES = {torch.bfloat16: (128, 128, 64, 8), torch.float32: (64, 64, 32, 4)}
# The same where a Hopper GPU copies whole tiles of bf16 (TMA): wider, since no thread holds addresses. The instructions
# over k are the same, and so are the bits.
WIDE = 256


@dataclass(frozen=True)
class Groups:
    """Consecutive groups of rows.

    sizes:  rows of each group. counts: [groups] int64, the same numbers on the rows' device.
    total:  rows of all groups in a CUDA graph, whose replays have other sizes: there `sizes` is empty. Elsewhere 0.
            Rows that are counted beyond it, as routers may of NaN, are not read.
    """

    sizes: tuple[int, ...]
    counts: Tensor
    total: int = 0

    @cached_property
    def ends(self) -> Tensor:
        """[groups] int64: one past the last row of each group."""
        ends = self.counts.cumsum(0)
        return ends.clamp(max=self.total) if self.total else ends

    def tiles(self, height: int) -> tuple[Tensor, Tensor]:
        """Get the group and the first row of every tile of `height` rows, int64; a tile has rows of one group only.

        In a CUDA graph there are as many as any sizes need; those beyond the last group's have none of its rows.
        """
        if height not in self._tiles:
            tiles = sum(-(-size // height) for size in self.sizes)
            if self.total:
                tiles = len(self.counts) + self.total // height
            every = (self.counts + height - 1) // height
            before = every.cumsum(0)
            number = torch.arange(tiles, device=every.device)
            group = torch.searchsorted(before, number, right=True).clamp(max=len(every) - 1)
            # Of each group: its first row, less the rows of all earlier tiles.
            shift = self.ends - self.counts - (before - every) * height
            self._tiles[height] = group, shift[group] + number * height
        return self._tiles[height]

    def joined(self, each: int) -> "Groups":
        """Return the groups with so many neighbours as one, whose last tiles waste fewer rows."""
        if each not in self._joined:
            sizes = tuple(map(sum, batched(self.sizes, each)))
            self._joined[each] = Groups(sizes, self.counts.view(-1, each).sum(1), self.total)
        return self._joined[each]

    @cached_property
    def _joined(self) -> "dict[int, Groups]":
        return {1: self}

    @cached_property
    def _tiles(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}


def grouped_gemm(x: Tensor, weights: Sequence[Tensor], out: Tensor, groups: Groups, *, transposed: bool) -> None:
    """out[rows of g] = x[rows of g] @ weights[g], or @ weights[g]^T; summed in fp32 over k in order, rounded once.

    x:       [rows, k] contiguous, on a GPU; out: [rows, n] of x's dtype.
    weights: one contiguous tensor of x's dtype per group: [k, n], or [n, k] if `transposed`.
    """
    tile_m, tile_n, tile_k, warps = TILES[x.dtype]
    group, first = groups.tiles(tile_m)
    k, n = x.shape[1], out.shape[1]
    strides, aligned = (1, k) if transposed else (n, 1), all_aligned(weights)
    copies = aligned and not (n % 8 or k % 8 or x.data_ptr() % 16) and _copies_tiles(x.dtype, x.device)
    if copies:
        triton.set_allocator(_scratch)  # each thread has its own
        tile_n = tile_n if n % WIDE else WIDE
    across = triton.cdiv(n, tile_n)
    if len(group):
        tensors = (x, weights[0], out, offsets_of(weights), group, first, groups.ends)
        constants = (n, k, *strides, aligned, copies, tile_m, tile_n, tile_k)
        PRODUCT.launch((len(group) * across, 1), tensors, (len(x),), constants, warps, 4 if tile_n == WIDE else 3)


def grouped_weight_gradient(
    dy: Tensor, x: Tensor, outs: Sequence[Tensor], groups: Groups, chain: Sequence[int] = (0,)
) -> None:
    """outs[i] += dy[rows of g]^T @ x[rows of g], for each of its groups g, one after the other.

    The rows of a group are summed in fp32 in order, then the sum is added. An output is read and written once.

    dy:    [rows, n] contiguous, on a GPU; x: [rows, k] of dy's dtype.
    outs:  [n, k] fp32 each, contiguous; outs[i] has the groups from i · len(chain) on.
    chain: the order of an output's groups.
    """
    tile_n, tile_k, step, warps = TILES[x.dtype]
    n, k = dy.shape[1], x.shape[1]
    grid = (triton.cdiv(n, tile_n) * triton.cdiv(k, tile_k), len(outs))
    constants = (n, k, len(chain), all_aligned(outs), tile_n, tile_k, step)
    tensors = (dy, x, outs[0], offsets_of(outs), groups.ends, on_device(chain, dy.device))
    WEIGHT_GRADIENT.launch(grid, tensors, (), constants, warps)


_known: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """[n] int64, cached."""
    key = device, tuple(numbers)
    if key not in _known:
        _known[key] = torch.tensor(key[1], device=device)
    return _known[key]


def offsets_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return each tensor's offset from the first in elements, [groups] int64, cached since tensors seldom move."""
    first, size = tensors[0].data_ptr(), tensors[0].element_size()
    return on_device([(tensor.data_ptr() - first) // size for tensor in tensors], tensors[0].device)


@cache
def _copies_tiles(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _scratch(size: int, _alignment: int, _stream: int | None) -> Tensor:
    """Return memory for a kernel's descriptions of tiles."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def all_aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether each begins where 16 bytes do."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weights, out, offsets, group, first, ends, rows,
    N: tl.constexpr, K: tl.constexpr, W_ROW: tl.constexpr, W_COLUMN: tl.constexpr, ALIGNED: tl.constexpr,
    COPIES: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (N + TILE_N - 1) // TILE_N
    tile = tl.program_id(0) // across
    g = tl.load(group + tile)
    if tl.load(first + tile) >= tl.load(ends + g):
        return  # a tile that these sizes do not need
    offset = tl.load(offsets + g)
    if ALIGNED:
        offset = tl.multiple_of(offset, 4)
    row = tl.load(first + tile) + tl.arange(0, TILE_M).to(tl.int64)[:, None]
    inside = row < tl.load(ends + g)
    column = (tl.program_id(0) % across * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)[None, :]
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    if COPIES:  # the tile's last rows may be the next group's: a row's sum reads no other
        x_tiles = tl.make_tensor_descriptor(x, [rows, K], [K, 1], [TILE_M, TILE_K])
        if W_ROW == 1:
            w_tiles = tl.make_tensor_descriptor(weights + offset, [N, K], [K, 1], [TILE_N, TILE_K])
        else:
            w_tiles = tl.make_tensor_descriptor(weights + offset, [K, N], [N, 1], [TILE_K, TILE_N])
        top, left = tl.load(first + tile).to(tl.int32), tl.program_id(0) % across * TILE_N
        for done in range(0, K, TILE_K):
            a = x_tiles.load([top, done])
            b = w_tiles.load([left, done]).T if W_ROW == 1 else w_tiles.load([done, left])
            total = tl.dot(a, b, total, input_precision="ieee")
    else:
        i = tl.arange(0, TILE_K).to(tl.int64)
        x_at = x + row * K + i[None, :]
        w_at = weights + offset + i[:, None] * W_ROW + column * W_COLUMN
        for done in range(0, K, TILE_K):
            in_k = i < K - done
            a = tl.load(x_at, mask=inside & in_k[None, :], other=0.0)
            b = tl.load(w_at, mask=in_k[:, None] & (column < N), other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
            x_at += TILE_K
            w_at += TILE_K * W_ROW
    tl.store(out + row * N + column, total.to(out.dtype.element_ty), mask=inside & (column < N))


@triton.jit
def _of_group(
    dy, x, ends, g, row, column,
    N: tl.constexpr, K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return a tile of dy^T @ x, of the rows of group g."""
    end = tl.load(ends + g)
    begin = tl.where(g > 0, tl.load(ends + tl.maximum(g, 1) - 1), 0)
    i = tl.arange(0, STEP).to(tl.int64)
    total = tl.zeros((TILE_N, TILE_K), dtype=tl.float32)
    for token in range(begin, end, STEP):
        at = token + i
        a = tl.load(dy + at[None, :] * N + row[:, None], mask=(at < end)[None, :] & (row < N)[:, None], other=0.0)
        b = tl.load(x + at[:, None] * K + column[None, :], mask=(at < end)[:, None] & (column < K)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def _weight_gradient(
    dy, x, outs, offsets, ends, chain,
    N: tl.constexpr, K: tl.constexpr, CHAIN: tl.constexpr, ALIGNED: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (K + TILE_K - 1) // TILE_K
    offset = tl.load(offsets + tl.program_id(1))
    if ALIGNED:
        offset = tl.multiple_of(offset, 4)
    row = (tl.program_id(0) // across * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    column = (tl.program_id(0) % across * TILE_K + tl.arange(0, TILE_K)).to(tl.int64)
    inside = (row < N)[:, None] & (column < K)[None, :]
    at_out = outs + offset + row[:, None] * K + column[None, :]
    if CHAIN == 1:  # the output takes no registers before it is needed
        out = _of_group(dy, x, ends, tl.program_id(1), row, column, N, K, TILE_N, TILE_K, STEP)
        out += tl.load(at_out, mask=inside)
    else:
        out = tl.load(at_out, mask=inside)
        for link in range(CHAIN):
            g = tl.program_id(1) * CHAIN + tl.load(chain + link)
            out += _of_group(dy, x, ends, g, row, column, N, K, TILE_N, TILE_K, STEP)
    tl.store(at_out, out, mask=inside)


PRODUCT = Kernel(_product)
WEIGHT_GRADIENT = Kernel(_weight_gradient)
