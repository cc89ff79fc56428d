# SPDX-License-Identifier: Apache-2.0
"""Operands as they are, in bf16 or fp32. The other formats replace what they do otherwise.

    format       an operand holds                    its GEMMs                     of a split sum travel
    plain.py     the numbers                         the mode's                       nodes of the tree
    mxfp8.py     numbers rounded in blocks of 32     the mode's                       nodes of the tree
    fp8.py       codes and scales                    numerics/gemm/fp8.py         nodes of the tree
    gathered.py  the numbers                         fixed-tile GEMMs                      the operands

numerics/layers/linear.py and numerics/layers/experts/experts.py say which GEMMs a layer needs. A side is
an operand of a sum over features (`rows`) or over tokens (`columns`).

On a GPU the lowest levels of the tree cost little (numerics/gemm/contraction.py): one launch adds up to 16
GEMMs, or a GEMM itself adds the GEMM of a segment or of the right neighbour to the output, and rounds as a
separate addition would.

Where a rank holds the tokens of several context shards (numerics/sums/data_shards.py), each is a GEMM of its own:
sums over tokens are trees over these shards, and on a CPU a GEMM's bits depend on the number of its rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor

from tp_invariant_recipes.kernels.gemm.fixed_tile_gemm import fixed_tile_gemm
from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups, grouped_gemm, grouped_weight_gradient
from tp_invariant_recipes.numerics.gemm import contraction, cpu, sampling
from tp_invariant_recipes.numerics.gemm.gemm import gemm
from tp_invariant_recipes.numerics.gemm.operands import Split
from tp_invariant_recipes.numerics.sums.data_shards import each_context
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.symmetric_memory import PeerSum
from tp_invariant_recipes.numerics.sums.tree import (
    Moving,
    all_gather,
    reduce_scatter_by_slices,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from tp_invariant_recipes.numerics.sums.weight_gradient import weight_gradient

if TYPE_CHECKING:
    from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import Batches


@dataclass(frozen=True)
class Gemms:
    """Multiply matrices.

    gemm: as `numerics.gemm.gemm.gemm`. partials, on CPUs alone: as `numerics.gemm.cpu.partials`.
    """

    gemm: Callable[..., Tensor]
    partials: Callable[..., Tensor]


LIBRARY = Gemms(gemm, cpu.partials)


class Contraction(Protocol):
    """A GEMM whose summed dimension is divided among ranks, started."""

    def finished(self, dtype: torch.dtype) -> Tensor:
        """[tokens/t, features] where the result is divided by tokens, else [tokens, features]."""
        ...


@dataclass
class Reduced:
    """A contraction by nodes of the tree. scatters: its result is divided by tokens."""

    sum: Moving | PeerSum
    mesh: VirtualMesh
    scatters: bool

    def finished(self, dtype: torch.dtype) -> Tensor:
        """As Contraction's."""
        mine = self.sum.finished(dtype)
        return mine if self.scatters else all_gather(mine, self.mesh)


@dataclass(frozen=True)
class Plain:
    """The format of a layer. Methods that take `groups` or batches serve experts, too."""

    products: Gemms = LIBRARY

    def for_layer(self, x: Tensor, *weights: Tensor) -> Self:
        """Return the format for one forward and backward pass, made outside of autograd's function, which hides
        gradients.

        x: [s, b, k]. Raises NotImplementedError: x is of several sequences, and the format knows one alone.
        """
        return self

    def for_experts(self, *weights: Tensor) -> Self:
        """As `for_layer`, for weights that the rank holds whole."""
        return self

    def from_input(
        self, x: Tensor, gathers: bool = False, groups: Groups | None = None
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """Return the rows of x, [tokens, k], and what a backward pass needs for its columns.

        gathers: other ranks have the other tokens. groups: of the tokens, which share no blocks and scales.
        """
        return x, (x,)

    def from_gradient(
        self, dy: Tensor, mesh: VirtualMesh | None, wants_rows: bool, wants_columns: bool, groups: Groups | None = None
    ) -> tuple[Any, Any]:
        """Return the sides of dy, [tokens, n]. mesh: its ranks have the other tokens, which are gathered."""
        whole = dy if mesh is None else all_gather(dy, mesh)
        return whole, whole

    def gathered(self, rows: Any, mesh: VirtualMesh) -> Any:
        """Return the rows of all ranks."""
        return all_gather(rows, mesh)

    def start_gathering(self, kept: Sequence[Tensor], mesh: VirtualMesh) -> Moving:
        """Start gathering all ranks' tokens of what `from_input` has kept."""
        return start_all_gather(kept[0], mesh)

    def columns(self, kept: Sequence[Tensor], tokens: Tensor | None) -> Any:
        """Return the columns of an input. kept: as of `from_input`; tokens: of all ranks, where they were gathered."""
        return kept[0] if tokens is None else tokens

    def across(self, weights: Sequence[Tensor], *, forward: bool) -> Sequence[Any]:
        """Weights as operands beside rows: of a forward pass, or of the input's gradient."""
        return weights

    def multiply(
        self, rows: Any, across: Any, out: Tensor, mesh: VirtualMesh, columns: Split, *, forward: bool
    ) -> None:
        """out = rows @ across, transposed in a forward pass; of each context shard by itself.

        columns: the shards of the result's features.
        """
        across = across.t() if forward else across
        for x, y in each_context(mesh, rows, out):
            self.products.gemm(x, across, y, columns=columns)

    def start_contraction(
        self, rows: Any, across: Any, mesh: VirtualMesh, segments: Split, *, forward: bool, scatters: bool,
        dtype: torch.dtype,
    ) -> Contraction:  # fmt: skip
        """Start `multiply` with the summed dimension divided among the ranks.

        rows: [tokens, k/t], of this rank's segments and shards of k. dtype: that the result will have.
        """
        across = across.t() if forward else across
        summed = start_contraction(rows, across, mesh, segments, self.products, forward, dtype)
        return summed if mesh.size == 1 else Reduced(summed, mesh, scatters)

    def weight_gradient(
        self, weight: Tensor, dy: Any, x: Any, mesh: VirtualMesh, waits: bool = False, **shards: Split
    ) -> Tensor:
        """dy^T @ x, both columns, of each context shard by itself.

        waits: as of numerics/sums/weight_gradient.py. shards: the rows or columns of `product`.
        """
        parts = [partial(self._add_gradient, grad, tokens, shards) for grad, tokens in each_context(mesh, dy, x)]
        return weight_gradient(weight, *parts, waits=waits)

    def _add_gradient(self, grad: Tensor, tokens: Tensor, shards: dict[str, Split], out: Tensor, add: bool) -> Tensor:
        return self.products.gemm(grad.t(), tokens, out, add=add, **shards)

    def multiply_groups(
        self, rows: Any, across: Sequence[Any], out: Tensor, groups: Groups, *, forward: bool
    ) -> Tensor:  # fmt: skip
        """Each group's rows times its operand of `across`, transposed in a forward pass. returns: `out`."""

        def operand(group: int) -> Tensor:
            return across[group].t() if forward else across[group]

        if rows.is_cuda:
            started = sampling.begin_group(groups.sizes, lambda n, at: (rows[at], operand(n), out[at]))
            each = sum(weight is across[0] for weight in across)  # sources of an expert's rows
            grouped_gemm(rows, across[::each], out, groups.joined(each), transposed=forward)
            if started is not None:
                started.end()
            return out
        for n, (of_group, part) in enumerate(zip(rows.split(groups.sizes), out.split(groups.sizes), strict=True)):
            if len(of_group):
                self.products.gemm(of_group, operand(n), part)
        return out

    def add_gradients(self, dy: Any, kept: Sequence[Tensor], outs: list[Tensor], batches: "Batches") -> None:
        """Add to each fp32 tensor dy^T x of its batches, in order. dy: columns; kept: as of `from_input`.

        outs: one for each expert and buffer of gradients.
        """
        x, sizes = kept[0], batches.groups.sizes
        if x.is_cuda:
            started = sampling.begin_chain(sizes, batches.chain, dy, x, outs)
            grouped_weight_gradient(dy, x, outs, batches.groups, batches.chain)
            if started is not None:
                started.end()
            return
        dy_parts, x_parts = dy.split(sizes), x.split(sizes)
        for out, batch in batches.in_order(outs):
            if sizes[batch]:
                self.products.gemm(dy_parts[batch].t(), x_parts[batch], out, add=True)


PLAIN = Plain()


def require_single_sequence(x: Tensor) -> None:
    """Raise NotImplementedError unless x, [s, b, k], is of one sequence: several would share scales."""
    if x.shape[1] != 1:
        raise NotImplementedError(f"{x.shape[1]} sequences at once: their scales are a sequence's own; mbs=1")


def start_contraction(
    a: Tensor, b: Tensor, mesh: VirtualMesh, segments: Split, products: Gemms, by_slices: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Moving | PeerSum:  # fmt: skip
    """Start a @ b with the summed dimension divided among the ranks.

    a: [tokens, k/t]; b: [k/t, features]: this rank's segments and shards of k. by_slices: nothing else hides how long
    nodes travel, so that each rank's slice is a GEMM of its own; on a GPU rows do not depend on each other. dtype: of
    the result.
    """
    sizes = sizes_of(segments, a.shape[1])
    if not a.is_cuda:
        partials = [products.partials(rows, b, mesh.local, sizes) for (rows,) in each_context(mesh, a)]
        return start_reduce_scatter(torch.cat(partials, 1) if len(partials) > 1 else partials[0], mesh)
    if by_slices and mesh.contexts == 1:
        nodes = lambda rows: contraction.nodes(a[rows], b, mesh, sizes, products.gemm)  # noqa: E731
        if (started := reduce_scatter_by_slices(a, b.shape[1], mesh, nodes)) is not None:
            return started
    return start_reduce_scatter(contraction.nodes(a, b, mesh, sizes, products.gemm, dtype), mesh)


def sizes_of(segments: Split, features: int) -> tuple[int, ...]:
    """Return the size of each segment of so many features."""
    return (features // segments,) * segments if isinstance(segments, int) else segments


def _fixed_tiles(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False, **_shards: Split) -> Tensor:
    return fixed_tile_gemm(a, b, out, add=add)


class Gathered(Plain):
    """Plain operands, whole on every rank that multiplies them."""

    def start_contraction(
        self, rows: Any, across: Any, mesh: VirtualMesh, segments: Split, *, forward: bool, scatters: bool,
        dtype: torch.dtype,
    ) -> Contraction:  # fmt: skip
        """As Plain's; with `scatters` this rank gets all features of its tokens, otherwise of all."""
        return _Whole(
            start_all_to_all(rows, mesh) if scatters else start_all_gather(rows.unsqueeze(0), mesh),
            start_all_gather(across.unsqueeze(0), mesh),
            sizes_of(segments, rows.shape[1]),
            forward,
        )


GATHERED = Gathered(Gemms(_fixed_tiles, cpu.partials))


@dataclass
class _Whole:
    """The operands of a GEMM over sharded features, in communication: a slice of the features from every rank.

    tokens: [t, m, k/t], m tokens; weight: [t, n, k/t] of a forward pass, else [t, k/t, n], the ranks' weights.
    sizes:  of the segments of k/t.
    """

    tokens: Moving
    weight: Moving
    sizes: tuple[int, ...]
    forward: bool

    def finished(self, dtype: torch.dtype) -> Tensor:
        """[m, n] in `dtype`."""
        a = _in_order(self.tokens.arrived(), self.sizes, 1)
        b = (
            _in_order(self.weight.arrived(), self.sizes, 1).t()
            if self.forward
            else _in_order(self.weight.arrived(), self.sizes, 0)
        )
        return fixed_tile_gemm(a, b, torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device))


def _in_order(slices: Tensor, sizes: tuple[int, ...], dim: int) -> Tensor:
    """Return the ranks' matrices, [t, …], joined along `dim` with every segment contiguous."""
    if len(slices) == 1:
        return slices[0]
    return torch.cat([part for segment in slices.split(sizes, dim + 1) for part in segment], dim)
