# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of one virtual shard (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", ICLR 2025).

Per head, with unit keys and queries, a state S [key, value] that begins with zeros, a decay g < 0 and a strength β:

    S[t] = exp(g[t]) S[t-1] + k[t] (β[t] (v[t] - exp(g[t]) S[t-1]ᵀ k[t]))ᵀ        o[t] = S[t]ᵀ q[t] / sqrt(key)

It is computed in fp32, in chunks of 64 tokens: kernels/delta_rule.py has the equations, and a GPU's kernels, for all
shards at once. A CPU has the plain torch below: library GEMMs on the shape of one shard and its sequences, the same
in every layout. Both agree to rounding. The backward pass computes the forward pass again: between the two only the
shards' inputs stay.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.kernels.delta_rule import CHUNK, EPSILON, Heads, delta_rule_backward, delta_rule_forward
from tp_invariant_recipes.kernels.row_sums import folding_sum
from tp_invariant_recipes.numerics.layers.mamba import by_shard, joined_shards


def gated_delta_rule(x: Tensor, alpha: Tensor, beta: Tensor, log_a: Tensor, dt_bias: Tensor, sizes: Heads) -> Tensor:
    """Return the rule of n shards with g = -exp(log_a) softplus(alpha + dt_bias) and β = sigmoid(beta).

    x:       [n, s, b, q | k | v], contiguous; q, k: [groups · key], normed here; v: [heads · value].
    alpha, beta: [n, s, b, heads]; log_a, dt_bias: [n, heads]. A group has heads / groups consecutive heads.
    returns: [n, s, b, heads · value] of x's dtype, rounded once.
    """
    return _Rule.apply(sizes, x, alpha, beta, log_a, dt_bias)


def gated(x: Tensor, z: Tensor, shards: int) -> Tensor:
    """x · silu(z) in fp32, rounded once; [..., shards · f]. On a CPU by shard: incomplete vectors are then the same."""
    if x.is_cuda:
        return _gated(x, z)
    parts = zip(by_shard([x], shards), by_shard([z], shards), strict=True)
    return joined_shards(torch.stack([_gated(*part) for part in parts]))


def _gated(x: Tensor, z: Tensor) -> Tensor:
    return (x.float() * F.silu(z.float())).to(x.dtype)


class _Rule(LayerFunction):
    @staticmethod
    def forward(ctx: Any, sizes: Heads, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.sizes = sizes
        if inputs[0].is_cuda:
            return with_kernels(sizes, *inputs)
        return torch.stack([_of_shard(sizes, *shard) for shard in zip(*inputs, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, by_shard = ctx.saved_tensors, []
        if inputs[0].is_cuda:
            return None, *gradients_with_kernels(ctx.sizes, gradients[0], *inputs)
        for dy, *shard in zip(gradients[0], *inputs, strict=True):
            with torch.enable_grad():
                leaves = [part.detach().requires_grad_() for part in shard]
                y = _of_shard(ctx.sizes, *leaves)
            by_shard.append(torch.autograd.grad(y, leaves, dy))
        return None, *map(torch.stack, zip(*by_shard, strict=True))


def with_kernels(sizes: Heads, x: Tensor, alpha: Tensor, beta: Tensor, log_a: Tensor, dt_bias: Tensor) -> Tensor:
    """Return the rule on a GPU, or in Triton's interpreter."""
    *_, decay, strength = _numbers(alpha, beta, log_a, dt_bias)
    return delta_rule_forward(x, decay, strength, sizes)[0]


def gradients_with_kernels(
    sizes: Heads, dy: Tensor, x: Tensor, alpha: Tensor, beta: Tensor, log_a: Tensor, dt_bias: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of x, alpha, beta, log_a and dt_bias, of their dtypes."""
    shifted, rate, decay, strength = _numbers(alpha, beta, log_a, dt_bias)
    dx, ddecay, dstrength = delta_rule_backward(dy, x, decay, strength, sizes)
    dalpha, dbeta = ddecay * rate * shifted.sigmoid(), dstrength * strength * (1.0 - strength)
    dlog_a, ddt_bias = folding_sum(torch.stack((ddecay * decay, dalpha)).flatten(2, 3), 2)
    gradients, likes = (dalpha, dbeta, dlog_a, ddt_bias), (alpha, beta, log_a, dt_bias)
    return dx, *(gradient.to(like.dtype) for gradient, like in zip(gradients, likes, strict=True))


def _numbers(alpha: Tensor, beta: Tensor, log_a: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """alpha + dt_bias, -exp(log_a), g and β."""
    shifted, rate = alpha.float() + dt_bias.float()[:, None, None], -log_a.float().exp()[:, None, None]
    return shifted, rate, rate * F.softplus(shifted), beta.float().sigmoid()


def _of_shard(sizes: Heads, x: Tensor, alpha: Tensor, beta: Tensor, log_a: Tensor, dt_bias: Tensor) -> Tensor:
    """Return the rule of one shard as kernels/delta_rule.py writes it, in plain torch. x: [s, b, q | k | v]."""
    groups, heads, key, value = sizes
    q, k, v = x.float().split((groups * key, groups * key, heads * value), -1)
    q, k = (_unit(tensor.unflatten(-1, (groups, key))).repeat_interleave(heads // groups, 2) for tensor in (q, k))
    decay = -log_a.float().exp() * F.softplus(alpha.float() + dt_bias.float())
    parts = q * key**-0.5, k, v.unflatten(-1, (heads, value)), beta.float().sigmoid().unsqueeze(-1), decay.unsqueeze(-1)
    q, k, v, strength, decay = map(_in_chunks, parts)
    passed = decay.cumsum(-2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).triu(1)
    between = (passed - passed.transpose(-1, -2)).masked_fill(later, -torch.inf).exp()
    across, up, down = k.transpose(-1, -2), passed.exp(), between[..., -1, :].unsqueeze(-1)
    systems, within = strength * (k @ across) * between, q @ across * between
    state, outputs = torch.zeros(x.shape[1], heads, key, value, device=x.device), []
    for q_, k_, v_, beta_, up_, down_, system, near in zip(
        *(tensor.unbind(2) for tensor in (q, k, v, strength, up, down, systems, within)), strict=True
    ):
        new = beta_ * (v_ - up_ * (k_ @ state))
        new = torch.linalg.solve_triangular(system, new, upper=False, unitriangular=True)  # reads A below its diagonal
        outputs.append(up_ * (q_ @ state) + near @ new)
        state = up_[..., -1:, :] * state + k_.transpose(-1, -2) @ (down_ * new)
    y = torch.stack(outputs, 2).flatten(2, 3)[:, :, : len(x)]
    return y.permute(2, 0, 1, 3).flatten(2).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def _in_chunks(x: Tensor) -> Tensor:
    """[s, b, h, f] → [b, h, c, CHUNK, f], zeros after the end: they add nothing and decay nothing."""
    return F.pad(x.permute(1, 2, 0, 3), (0, 0, 0, -len(x) % CHUNK)).unflatten(2, (-1, CHUNK))
