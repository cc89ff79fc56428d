# SPDX-License-Identifier: Apache-2.0
"""Operands in FP8: codes, and scales that belong to a tensor or to blocks of 128.

    forward          x (e4m3) @ weight^T (e4m3)
    input gradient   dy (e5m2, or e4m3) @ weight
    weight gradient  dy^T @ x, over the tokens of a context shard

Each shard of a summed dimension is a GEMM by the definition of kernels/gemm/fp8_tiles.py, a multiple of 128
long, so accumulators are promoted at the same places for every t. Scales are those of a tensor,
whoever holds its parts:

    tensorwise  a maximum over the ranks that share the sequence, of a weight over those that share it
    blockwise   of 128 numbers along what is summed; no border of a shard cuts them

Every operand is quantized along its features and along its tokens. Tensorwise both are the same numbers, so what ranks
exchange is in FP8. A layer keeps its input in FP8 along its tokens, for the weight gradient; blockwise in bf16 where a
rank has a part of the tokens, since blocks of the whole may lie on two.

Experts' batches are the tokens of one expert from one source, a context shard of a sequence, in every layout. So
tensorwise each batch has a scale of its own, and blockwise its tokens are filled up to a multiple of 128 with zeros,
which add nothing. An expert's weights lie whole with its owner.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import outside_modes
from tp_invariant_recipes.kernels.gemm import mxfp8
from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups
from tp_invariant_recipes.kernels.gemm.quantize import BLOCK, E4M3, E5M2, Quantized, of_groups
from tp_invariant_recipes.numerics.gemm import cublas, fp8, quantize
from tp_invariant_recipes.numerics.gemm.operands import Split
from tp_invariant_recipes.numerics.layers.formats.plain import (
    Gemms,
    Plain,
    Reduced,
    require_single_sequence,
    sizes_of,
)
from tp_invariant_recipes.numerics.precision import Fp8Layers
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import (
    Moving,
    all_gather,
    reduce_scatter_by_slices,
    start_all_gather,
    start_reduce_scatter,
)
from tp_invariant_recipes.numerics.sums.weight_gradient import weight_gradient

if TYPE_CHECKING:
    from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import Batches


@dataclass(frozen=True)
class Mxfp8(Plain):
    """GEMMs: of the rounded operands. gradients: their type. keeps: a backward pass will need the input."""

    gradients: torch.dtype = E5M2
    keeps: bool = True

    @classmethod
    def from_layers(cls, layers: Fp8Layers, products: Gemms) -> Self:
        """Read the arithmetic from a configuration's layers."""
        return cls(products, E5M2 if layers.gradients == "e5m2" else E4M3)

    def for_layer(self, x: Tensor, *weights: Tensor) -> Self:
        """As Plain's."""
        require_single_sequence(x)
        return self.for_experts(*weights)

    def for_experts(self, *weights: Tensor) -> Self:
        """As Plain's."""
        keeps = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
        return replace(self, keeps=keeps)

    def from_input(
        self, x: Tensor, gathers: bool = False, groups: Groups | None = None
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """As Plain's."""
        rows, columns = mxfp8.sides(x, E4M3, True, self.keeps and not gathers, groups)
        return rows, (columns,) if self.keeps else ()

    def from_gradient(
        self, dy: Tensor, mesh: VirtualMesh | None, wants_rows: bool, wants_columns: bool, groups: Groups | None = None
    ) -> tuple[Any, Any]:
        """As Plain's."""
        whole = dy if mesh is None else all_gather(dy, mesh)
        return mxfp8.sides(whole, self.gradients, wants_rows, wants_columns, groups)

    def columns(self, kept: Sequence[Tensor], tokens: Tensor | None) -> Any:
        """As Plain's."""
        return kept[0] if tokens is None else mxfp8.along_columns(tokens, E4M3)

    def across(self, weights: Sequence[Tensor], *, forward: bool) -> Sequence[Any]:
        """As Plain's."""
        if len(weights) == 1:
            return [(mxfp8.along_rows if forward else mxfp8.along_columns)(weights[0], E4M3)]
        return mxfp8.of_weights(weights, rows=forward)


ATTRIBUTE = "fp8"  # attribute of a weight

_steps = [0]  # a count of `changed`


def changed() -> None:
    """Weights may have changed."""
    _steps[0] += 1


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """rows: [n, k]; columns: [k, n], the same numbers; Quantized.

    step: the step these weights belong to; None: every replay of a graph reads them.
    requantize: quantizes a weight into the memory of both; in_memory: the step whose numbers it holds now.
    """

    rows: Any
    columns: Any
    requantize: Callable[[Tensor], object]
    step: int | None
    in_memory: list[int | None]

    def of_backward(self) -> Any:
        """`columns`. Raises RuntimeError if a forward pass of another step came between."""
        now = self.in_memory[0]
        if now != self.step and None not in (now, self.step):
            raise RuntimeError(
                f"a weight {[*self.rows.data.shape]} was quantized again before a backward pass of the step before"
            )
        return self.columns


@outside_modes
def quantized(weight: Tensor, blockwise: bool, group: Any) -> Fp8Weight:
    """Return a weight for a forward pass, to be called before autograd's function, which hides whether there are
    gradients.

    group: of the ranks that hold the others of its shards; None: none do.
    """
    kept: Fp8Weight | None = getattr(weight, ATTRIBUTE, None)
    capturing = cublas.capturing(weight)
    if kept is not None and kept.step == _steps[0] and torch.is_grad_enabled() and not capturing:
        return kept
    step = None if capturing else _steps[0]
    if kept is None:
        (rows, columns), requantize = quantize.of_weight(weight.detach(), blockwise, group)
        kept = Fp8Weight(rows, columns, requantize, step, [step])
    else:
        kept.requantize(weight.detach())
        kept = replace(kept, step=step)
        kept.in_memory[0] = step
    setattr(weight, ATTRIBUTE, kept)
    return kept


@dataclass(frozen=True)
class Fp8:
    """The methods of Plain.

    blockwise: or one scale a tensor. gradients: their FP8 type. group: of the ranks that share a sequence, whose
    shards of weights are each other's too; None: one rank has all. weights: of the layer, for this pass.
    """

    blockwise: bool
    gradients: torch.dtype
    group: Any = None
    weights: tuple[Fp8Weight, ...] = ()

    @classmethod
    def from_layers(cls, layers: Fp8Layers, group: Any) -> Self:
        """Read the scaling from a configuration's layers. group: of this rank."""
        return cls(layers.recipe == "blockwise", E5M2 if layers.gradients == "e5m2" else E4M3, group)

    def for_layer(self, x: Tensor, *weights: Tensor) -> Self:
        """As Plain's."""
        require_single_sequence(x)
        return self._with(weights, self.group)

    def for_experts(self, *weights: Tensor) -> Self:
        """As Plain's."""
        return self._with(weights, None)

    def _with(self, weights: Sequence[Tensor], group: Any) -> Self:
        return replace(self, weights=tuple(quantized(weight, self.blockwise, group) for weight in weights))

    def from_input(
        self, x: Tensor, gathers: bool = False, groups: Groups | None = None
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """As Plain's."""
        x = x.contiguous()
        if gathers or groups is not None:
            q = self._rows(x, E4M3, groups)
            return q, (x,) if self.blockwise else (q.data, q.scale)
        q, columns = self._both(x, E4M3)
        return q, (columns.data, columns.scale)

    def from_gradient(
        self, dy: Tensor, mesh: VirtualMesh | None, wants_rows: bool, wants_columns: bool, groups: Groups | None = None
    ) -> tuple[Any, Any]:
        """As Plain's; of experts blockwise the columns are dy itself, since their groups are filled up later."""
        dy = dy.contiguous()
        if groups is not None:
            rows = self._rows(dy, self.gradients, groups)
            return rows, dy if self.blockwise else quantize.transposed(rows)
        if mesh is None or self.blockwise:
            return self._both(dy if mesh is None else all_gather(dy, mesh), self.gradients)
        rows = self.gathered(self._rows(dy, self.gradients, None), mesh)
        return rows, quantize.transposed(rows)

    def gathered(self, rows: Any, mesh: VirtualMesh) -> Any:
        """As Plain's."""
        data = all_gather(rows.data.view(torch.uint8), mesh).view(rows.data.dtype)
        scale = rows.scale if rows.blocks == "tensor" else all_gather(rows.scale.contiguous(), mesh)
        return Quantized(data, scale, rows.blocks)

    def start_gathering(self, kept: Sequence[Tensor], mesh: VirtualMesh) -> Moving:
        """As Plain's."""
        return start_all_gather(kept[0].view(torch.uint8) if kept[0].dtype == E4M3 else kept[0], mesh)

    def columns(self, kept: Sequence[Tensor], tokens: Tensor | None) -> Any:
        """As Plain's."""
        if tokens is None:
            return Quantized(kept[0], kept[1], "1x128" if self.blockwise else "tensor")
        if self.blockwise:
            return quantize.along_columns(tokens, E4M3)
        return quantize.transposed(Quantized(tokens.view(E4M3), kept[1]))

    def across(self, weights: Sequence[Tensor], *, forward: bool) -> Sequence[Any]:
        """As Plain's."""
        return [weight.rows if forward else weight.of_backward() for weight in self.weights]

    def multiply(
        self, rows: Any, across: Any, out: Tensor, mesh: VirtualMesh, columns: Split, *, forward: bool
    ) -> None:
        """As Plain's, all in one product."""
        fp8.gemm(rows, across, out)

    def start_contraction(
        self, rows: Any, across: Any, mesh: VirtualMesh, segments: Split, *, forward: bool, scatters: bool,
        dtype: torch.dtype,
    ) -> Reduced:  # fmt: skip
        """As Plain's."""
        sizes, features = sizes_of(segments, rows.data.shape[1]), across.data.shape[0]

        def of_rows(part: slice) -> Tensor:
            return fp8.nodes(rows.of_rows(part.start, part.stop - part.start), across, mesh, sizes)

        if forward and (started := reduce_scatter_by_slices(rows.data, features, mesh, of_rows)) is not None:
            return Reduced(started, mesh, scatters)
        return Reduced(start_reduce_scatter(fp8.nodes(rows, across, mesh, sizes, dtype), mesh), mesh, scatters)

    def weight_gradient(
        self, weight: Tensor, dy: Any, x: Any, mesh: VirtualMesh, waits: bool = False, **shards: Split
    ) -> Tensor:
        """As Plain's. dy: [n, tokens]; x: [k, tokens]."""
        size = dy.data.shape[1] // mesh.contexts
        starts = range(0, dy.data.shape[1], size)
        parts = [partial(fp8.gemm, dy.along_k(n, size), x.along_k(n, size)) for n in starts]
        return weight_gradient(weight, *parts, waits=waits)

    def multiply_groups(
        self, rows: Any, across: Sequence[Any], out: Tensor, groups: Groups, *, forward: bool
    ) -> Tensor:  # fmt: skip
        """As Plain's."""
        fp8.grouped_gemm(rows, across, out, groups)
        return out

    def add_gradients(self, dy: Any, kept: Sequence[Tensor], outs: list[Tensor], batches: "Batches") -> None:
        """As Plain's."""
        groups = batches.groups
        if self.blockwise:
            filled = Groups(  # a multiple of 128 rows each
                tuple(-(-size // BLOCK) * BLOCK for size in groups.sizes),
                torch.div(groups.counts + BLOCK - 1, BLOCK, rounding_mode="floor") * BLOCK,
            )
            sides = ((dy, self.gradients), (kept[0], E4M3))
            dy, x = (quantize.along_columns(_spread(rows, groups, filled), dtype) for rows, dtype in sides)
            groups = filled
        else:
            data, scale = kept
            x = quantize.transposed(Quantized(data, scale))
        fp8.grouped_weight_gradient(dy, x, outs, groups, batches.chain)

    def _rows(self, x: Tensor, dtype: torch.dtype, groups: Groups | None) -> Quantized:
        """x [m, k] as an operand of a sum over k."""
        if self.blockwise:
            return quantize.along_rows(x, dtype)
        return quantize.of_tensor(x, dtype, self.group) if groups is None else of_groups(x, groups.counts, dtype)

    def _both(self, x: Tensor, dtype: torch.dtype) -> quantize.Pair:
        """`_rows`, and x^T [k, m] as an operand of a sum over tokens."""
        return quantize.along_both(x, dtype) if self.blockwise else quantize.of_tensor_both_ways(x, dtype, self.group)


def _spread(x: Tensor, groups: Groups, filled: Groups) -> Tensor:
    """x with rows of zeros at the end of every group."""
    shift = (filled.ends - filled.counts) - (groups.ends - groups.counts)
    places = torch.arange(len(x), device=x.device) + torch.repeat_interleave(shift, groups.counts, output_size=len(x))
    spread = x.new_zeros(sum(filled.sizes), x.shape[1])
    spread[places] = x
    return spread
