# SPDX-License-Identifier: Apache-2.0
"""The parts of a Mamba-2 mixer between its two projections, on this rank's V/t virtual shards.

A shard consists of whole groups of heads. These parts are local to a shard, so each shard is computed alone, with the
same shape at every t. A kernel that reduces over a group's heads, or is tuned by their number, then cannot depend on t.

On a GPU the scan is mamba_ssm's. Its autotuner times kernels and may choose another one in every process, and its
backward pass adds atomically; `repeatable` prevents both. On a CPU it is in cpu_host/stand_ins/mamba.py.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.cpu_host.stand_ins import mamba as on_cpu
from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.kernels.causal_conv import TAPS, causal_conv_backward, causal_conv_forward
from tp_invariant_recipes.kernels.group_norm import group_norm_backward, group_norm_forward
from tp_invariant_recipes.numerics.sums.tree import tree_sums

SCAN = "mamba_ssm.ops.triton.ssd_combined"
# The modules with the kernels of mamba_ssm's scan.
TUNED = ("ssd_bmm", "ssd_chunk_scan", "ssd_chunk_state", "ssd_combined", "ssd_state_passing")


def by_shard(segments: Sequence[Tensor], shards: int, dim: int = -1) -> Tensor:
    """Return this rank's part of a tensor in segments (x, B, C), with the shards as first dimension.

    segments: […, shards · f, …] each, divided along `dim`.
    returns:  [shards, …, the segments' f concatenated, …], contiguous, so that each shard is contiguous.
    """
    parts = [segment.unflatten(dim, (shards, -1)).movedim(dim - 1 if dim < 0 else dim, 0) for segment in segments]
    return torch.cat(parts, dim if dim < 0 else dim + 1) if len(parts) > 1 else parts[0].contiguous()


def joined_shards(shards: Tensor) -> Tensor:
    """[n, …, f] → […, n · f]."""
    return shards.movedim(0, -2).flatten(-2)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor, step: int) -> Tensor:
    """SiLU of a causal convolution per channel.

    x: [n, rows, c], contiguous; weight: [n, c, 4]; bias: [n, c]; step: rows to the previous token.
    returns: x's shape and dtype. Every rank has all tokens, so the weights' gradients are complete.
    """
    return _CausalConv.apply(x, weight, bias, step)


def group_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, each group with its own weights.

    x: [n, rows, groups, d], contiguous; weight: [n, groups, d]. returns: x's shape and dtype.
    """
    return _GroupNorm.apply(x, weight, eps)


def chunk_scan(
    x: Tensor, dt: Tensor, log_a: Tensor, B: Tensor, C: Tensor, z: Tensor, D: Tensor, dt_bias: Tensor, chunk_size: int
) -> Tensor:
    """Return the gated scan of one shard, with softplus applied to dt.

    x, z: [b, s, heads, p]; dt: [b, s, heads]; B, C: [b, s, groups, n]; log_a, D, dt_bias: [heads], A = -exp(log_a).
    returns: [b, s, heads, p] of x's dtype.
    """
    a, bias = -torch.exp(log_a.float()), dt_bias.float()
    if x.is_cuda:
        repeatable()
        scan = import_module(SCAN).mamba_chunk_scan_combined
    else:
        scan = on_cpu.chunk_scan
    return scan(x, dt, a, B, C, chunk_size, D=D, z=z, dt_bias=bias, dt_softplus=True)


@cache
def repeatable() -> None:
    """Make mamba_ssm's scan repeat its bits in every process, permanently: one configuration per kernel, no atomics."""
    from triton.runtime.autotuner import Autotuner

    determinism = import_module("mamba_ssm.utils.determinism")
    determinism.set_deterministic_mode(True)
    for module in TUNED:
        for kernel in vars(import_module(f"mamba_ssm.ops.triton.{module}")).values():
            if isinstance(kernel, Autotuner):
                # Deterministic mode takes this one if it is on at import; the machine's speed does not matter.
                kernel.configs = [min(kernel.configs, key=determinism._estimate_config_cost)]
                kernel.cache.clear()


class _CausalConv(LayerFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, step: int) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.step = step
        return causal_conv_forward(x, weight, bias, step)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, bias = ctx.saved_tensors
        dx, leaves = causal_conv_backward(gradients[0], x, weight, bias, ctx.step)
        taps, sums = tree_sums(leaves).split((TAPS, 1), 1)
        return dx, taps.transpose(1, 2).to(weight.dtype), sums.squeeze(1).to(bias.dtype), None


class _GroupNorm(LayerFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = group_norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        dx, leaves = group_norm_backward(gradients[0], x, weight, scale)
        return dx, tree_sums(leaves).to(weight.dtype), None
