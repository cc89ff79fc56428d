# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm: each row's result is independent of the other rows; weight gradients are tree sums."""

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction, outside_modes
from tp_invariant_recipes.kernels.rms_norm import rms_norm_backward, rms_norm_forward
from tp_invariant_recipes.kernels.row_sums import centred_rows
from tp_invariant_recipes.numerics.layers.bias import row_bias
from tp_invariant_recipes.numerics.sums.data_shards import each_context
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.weight_gradient import reduce_weight_gradient


class NormShards(Enum):
    """The division of the rows into V shards, and this rank's part of them.

    SEQUENCE_WHOLE: V chunks of each context shard; x is [s, b, h], all of them, on every rank.
    SEQUENCE_SLICE: the same chunks; x is [s/t, b, h], this rank's part of them.
    HEADS:          V groups of consecutive heads; x is [s, b, heads/t, d], this rank's V/t.
    """

    SEQUENCE_WHOLE = "sequence chunks, all on every rank"
    SEQUENCE_SLICE = "sequence chunks, divided among the ranks"
    HEADS = "groups of heads, divided among the ranks"


class NormKernels(NamedTuple):
    """The two functions of kernels/rms_norm.py."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor]]


LIBRARY = NormKernels(rms_norm_forward, rms_norm_backward)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    mesh: VirtualMesh,
    shards_of: NormShards,
    kernels: NormKernels = LIBRARY,
    *,
    centred: bool = False,
) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension, in fp32, rounded once.

    x:       as `shards_of` says; weight: its last dimension.
    centred: the factor is 1 + weight, a sum in fp32 (`model.layernorm_zero_centered_gamma`).
    returns: x's shape and dtype; a row's bits, here and in its gradient, depend on that row alone.

    The weight gradient is the sum over the rows of all ranks, the same bits for every t dividing V;
    `partial_gradient.reduce_weight_gradient` returns it or adds it to `main_grad`.
    """
    check_rows(x, weight, mesh, shards_of)
    return _RMSNorm.apply(x, weight, eps, Norm(mesh, shards_of, kernels, centred))


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    mesh: VirtualMesh,
    sliced: bool,
    *,
    centred: bool = False,
) -> Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension, in fp32, rounded once.

    c = x - mean(x), whose gradient is dx = dc - mean(dc); then the RMSNorm of c, whose mean square is x's variance.

    x:       [s, b, h], or [s/t, b, h] if `sliced`; weight, bias: [h]. centred: as of `rms_norm`.
    returns: x's shape and dtype; rows and the gradients of weight and bias as of `rms_norm`.
    """
    shards_of = NormShards.SEQUENCE_SLICE if sliced else NormShards.SEQUENCE_WHOLE
    normal = rms_norm(_CentredRows.apply(x), weight, eps, mesh, shards_of, centred=centred)
    return row_bias(normal, bias, mesh, sliced).to(x.dtype)


class _CentredRows(LayerFunction):
    """[…, h] → fp32 of the same shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return centred_rows(x.reshape(-1, x.shape[-1]), torch.float32).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (dc,) = gradients
        return centred_rows(dc.reshape(-1, dc.shape[-1]), ctx.dtype).view(dc.shape)


@outside_modes
def check_rows(x: Tensor, weight: Tensor, mesh: VirtualMesh, shards_of: NormShards) -> None:
    """Raise ValueError where the gradient of the weight needs shards into which the rows are not divided."""
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return
    dim, what = (-2, "heads") if shards_of is NormShards.HEADS else (0, "positions")
    whole = x.shape[dim] if shards_of is NormShards.SEQUENCE_WHOLE else x.shape[dim] * mesh.size
    if whole % (mesh.shards if shards_of is NormShards.HEADS else mesh.chunks):
        raise ValueError(f"{mesh.shards} virtual shards do not divide the norm's {whole} {what}")


def _rows(x: Tensor, shards_of: NormShards) -> Tensor:
    """[tokens, heads, d]: a view where strides allow it."""
    heads = x.shape[-2] if shards_of is NormShards.HEADS else 1
    return x.reshape(-1, heads, x.shape[-1])


class Norm(NamedTuple):
    """The two passes of an RMSNorm, for functions of autograd. Fields: as of `rms_norm`."""

    mesh: VirtualMesh
    shards_of: NormShards
    kernels: NormKernels = LIBRARY
    centred: bool = False

    def forward(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the norm of x's shape, and the scale of each row that `backward` reads."""
        y, scale = self.kernels.forward(_rows(x, self.shards_of), self._factor(weight), eps)
        return y.view_as(x), scale

    def backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, wants_dx: bool, wants_dw: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x and weight that are wanted. dy: of the norm."""
        mesh, shards_of, kernels, _ = self
        everywhere, by_heads = shards_of is NormShards.SEQUENCE_WHOLE, shards_of is NormShards.HEADS
        dy, rows, factor = _rows(dy, shards_of), _rows(x, shards_of), self._factor(weight)
        if by_heads:
            parts = each_context(mesh, dy, rows, scale)
            by_context = [kernels.backward(d, r, factor, s, mesh.local, True) for d, r, s in parts]
            dx, leaves = by_context[0] if len(by_context) == 1 else map(torch.cat, zip(*by_context, strict=True))
        else:
            chunks = mesh.chunks if everywhere else mesh.local_chunks
            dx, leaves = kernels.backward(dy, rows, factor, scale, chunks, False)
        dw = reduce_weight_gradient(weight, leaves, mesh, everywhere, by_heads) if wants_dw else None
        return dx.view_as(x) if wants_dx else None, dw

    def _factor(self, weight: Tensor) -> Tensor:
        return weight.float() + 1.0 if self.centred else weight


class _RMSNorm(LayerFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, norm: Norm) -> Tensor:
        if norm.shards_of is NormShards.HEADS:  # keys are a view, which would keep queries and values too
            x = x.contiguous()
        y, scale = norm.forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        return *ctx.norm.backward(*gradients, *ctx.saved_tensors, *ctx.needs_input_grad[:2]), None, None
