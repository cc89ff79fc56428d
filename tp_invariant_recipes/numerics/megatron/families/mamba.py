# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's Mamba-2 mixer with the same result for every tensor-parallel degree.

Only its two projections sum across ranks. in_proj's rows are five segments of different sizes:

    [ z: shard v0, … | x: shard v0, … | B: shard v0, … | C: shard v0, … | dt: shard v0, … ]

The convolution, the scan and the norm take a shard's part of each segment, and out_proj takes the shard's y. Their
parameters are sharded and every rank has all tokens, so their gradients need no sum across ranks.
"""

import math
from typing import Any

import torch
from megatron.core.ssm.mamba_mixer import MambaMixer
from torch import Tensor

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.kernels.normal_quantile import horner
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.layers.mamba import by_shard, causal_conv, chunk_scan, group_norm, joined_shards
from tp_invariant_recipes.numerics.megatron.base import MixerOnMesh
from tp_invariant_recipes.numerics.megatron.init import _log
from tp_invariant_recipes.numerics.sums.weight_gradient import added_by_itself

STEPS = (0.001, 0.1)  # range of dt, whose logarithm is uniform
DECAYS = (1.0, 16.0)  # range of -A, which is uniform
CONV = 0.5  # 1 / sqrt(4): Kaiming's bound with a = sqrt(5), for weight and bias of 4 inputs
LOG_2 = math.log(2.0)


def conv(bits: Tensor) -> Tensor:
    """Uniform in (-1/2, 1/2)."""
    return uniform(bits) * (2.0 * CONV) - CONV


def a_log(bits: Tensor) -> Tensor:
    """log of a number uniform in (1, 16)."""
    return _log(uniform(bits) * (DECAYS[1] - DECAYS[0]) + DECAYS[0])


def dt_bias(bits: Tensor) -> Tensor:
    """x with softplus(x) = dt, the logarithm of dt uniform between those of 0.001 and 0.1: dt + log(1 - exp(-dt))."""
    low, high = math.log(STEPS[0]), math.log(STEPS[1])
    dt = _exp(uniform(bits) * (high - low) + low)
    # 1 - exp(-dt) = dt (1 - dt/2! + dt²/3! …); the series avoids the cancellation of the difference
    series = horner(-dt, [1.0 / math.factorial(k) for k in range(1, 14)])
    return dt + _log(dt * series)


def uniform(bits: Tensor) -> Tensor:
    """(2 · bits + 1) / 2^53: never 0, never 1."""
    return (2 * bits + 1).to(torch.float64) * 2.0**-53


def _exp(x: Tensor) -> Tensor:
    """e^x for x in [-20, 0], to an ulp or two: x = k log 2 + r, |r| <= log(2)/2."""
    k = torch.round(x * (1.0 / LOG_2))
    r = x - k * LOG_2
    powers = torch.tensor([2.0**-n for n in range(32)], dtype=torch.float64, device=x.device)
    return horner(r, [1.0 / math.factorial(n) for n in range(16)]) * powers[(-k).to(torch.int64)]


class InvariantMambaMixer(MixerOnMesh, MambaMixer):
    """A Mamba-2 mixer for training, with the parameters, names and checkpoints of MambaMixer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check()
        self.segments = tuple(self.in_proj.weight.partition_sizes)  # of z, x, B, C and dt on this rank
        self.in_proj.segments = self.segments

    def _check(self) -> None:
        shards = self.config.virtual_shards
        problems = [
            problem
            for wrong, problem in (
                (mode.HYBRID not in mode.mode_of(self.config).covers, mode.only(mode.HYBRID)),
                (
                    self.ngroups % shards,
                    f"numerics.virtual_shards={shards} must divide model.mamba_num_groups={self.ngroups}",
                ),
                (not self.use_mem_eff_path, "set model.use_mamba_mem_eff_path=true"),
                (self.cp.cp_size > 1, "Mamba layers with cp have no invariant version; cp=1"),
                (self.D_has_hdim or not self.rmsnorm, "a mixer without norm, or with D for every channel"),
            )
            if wrong
        ]
        if problems:
            raise ConfigError("no invariant Mamba layer: " + "; ".join(problems))

    def _ssm_training(self, zxBCdt: Tensor, packed_seq_params: Any = None) -> Tensor:
        """in_proj's output → out_proj's input: [s, b, (z | x | B | C | dt)/t] → [s, b, d_inner/t]."""
        if packed_seq_params is not None:
            raise NotImplementedError("packed sequences in Mamba layers have no invariant version")
        shards, batch = self.mesh.local, zxBCdt.shape[1]
        z, *xBC, dt = zxBCdt.split(self.segments, -1)
        y = self._scanned(self._convolved(by_shard(xBC, shards), batch), by_shard([z], shards), by_shard([dt], shards))
        groups = y.view(shards, -1, self.ngroups // self.mesh.shards, self.d_inner // self.ngroups)
        weight = added_by_itself(self.norm.weight).view(shards, *groups.shape[2:])
        return joined_shards(group_norm(groups, weight, self.norm.eps).view(y.shape))

    def _convolved(self, xBC: Tensor, batch: int) -> Tensor:
        """[n, s, b, c] → [n, s, b, c]."""
        shards, sizes = xBC.shape[0], self.conv1d_weight.partition_sizes
        weight, bias = (
            by_shard(added_by_itself(p).split(sizes), shards, 0) for p in (self.conv1d_weight, self.conv1d_bias)
        )
        return causal_conv(xBC.flatten(1, 2), weight.squeeze(2), bias, batch).view(xBC.shape)

    def _scanned(self, xBC: Tensor, z: Tensor, dt: Tensor) -> Tensor:
        """[n, s, b, x | B | C], [n, s, b, x], [n, s, b, heads] → [n, s, b, x]."""
        inner, state = z.shape[-1], (xBC.shape[-1] - z.shape[-1]) // 2
        per_head = [added_by_itself(p).view(xBC.shape[0], -1).unbind() for p in (self.A_log, self.D, self.dt_bias)]
        shards = []
        for xbc, gate, steps, a, d, bias in zip(xBC.unbind(), z.unbind(), dt.unbind(), *per_head, strict=True):
            parts = [part.transpose(0, 1) for part in (*xbc.split((inner, state, state), -1), gate, steps)]
            x, gate = (part.unflatten(-1, (-1, self.headdim)) for part in (parts[0], parts[3]))
            b, c = (part.unflatten(-1, (-1, self.d_state)) for part in parts[1:3])
            y = chunk_scan(x, parts[4], a, b, c, gate, d, bias, self.chunk_size)
            shards.append(y.flatten(2).transpose(0, 1))
        return torch.stack(shards)
