"""The gated delta rule of one virtual shard (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", ICLR 2025).

Per head, with unit keys and queries, a state S [key, value] that begins with zeros, a decay g < 0 and a strength β:

    S[t] = exp(g[t]) S[t-1] + k[t] (β[t] (v[t] - exp(g[t]) S[t-1]ᵀ k[t]))ᵀ        o[t] = S[t]ᵀ q[t] / sqrt(key)

It is computed in chunks of 64 tokens. In a chunk the corrections u solve a unit triangular system (I + A) u = β v with
A[i, j] = β[i] k[i]·k[j] exp(g[j+1] + … + g[i]) for j < i; its inverse grows from blocks of two, not row by row.

All of it is plain torch in fp32 on every device, with neither flash-linear-attention nor atomics. Library products are
launched on the shape of one shard and one sequence, the same in every layout. The backward pass computes the forward
pass again: between the two only the shard's inputs stay.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_invariant_recipes.host.function_modes import outside_modes

CHUNK = 64  # as Megatron-Core's torch_chunk_gated_delta_rule
EPSILON = 1e-6  # of the norms of queries and keys


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, log_a: Tensor, dt_bias: Tensor
) -> Tensor:
    """The rule with g = -exp(log_a) softplus(alpha + dt_bias) and β = sigmoid(beta).

    q, k: [b, s, groups, key], normed here; v: [b, s, heads, value], heads / groups consecutive ones for a group.
    alpha, beta: [b, s, heads]; log_a, dt_bias: [heads].
    returns: [b, s, heads, value] of v's dtype, rounded once.
    """
    return _AgainInBackward.apply(_rule, q, k, v, alpha, beta, log_a, dt_bias)


def gated(x: Tensor, z: Tensor) -> Tensor:
    """x · silu(z) in fp32, rounded once to x's dtype: the gate of the norm's output. x, z: one shape, contiguous."""
    return (x.float() * F.silu(z.float())).to(x.dtype)


class _AgainInBackward(torch.autograd.Function):
    @staticmethod
    @outside_modes
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.function = function
        return function(*inputs)

    @staticmethod
    @outside_modes
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [one.detach().requires_grad_() for one in ctx.saved_tensors]
            output = ctx.function(*inputs)
        return None, *torch.autograd.grad(output, inputs, gradients[0])


def _rule(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, log_a: Tensor, dt_bias: Tensor) -> Tensor:
    tokens, heads, groups, dtype = v.shape[1], v.shape[2], k.shape[2], v.dtype
    decay = -log_a.float().exp() * F.softplus(alpha.float() + dt_bias.float())
    # b batch, h head, c chunk, i and j positions in a chunk
    q, k = (_in_chunks(_spread(_unit(one.float()), heads // groups)) for one in (q, k))
    v, strength, decay = (_in_chunks(one) for one in (v.float(), beta.float().sigmoid()[..., None], decay[..., None]))
    passed = _running_sum(decay.squeeze(-1))  # b h c i: from the chunk's beginning
    between = passed.unsqueeze(-1) - passed.unsqueeze(-2)  # from j to i
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    between = between.masked_fill(later, -torch.inf).exp()
    q, stronger = q * k.shape[-1] ** -0.5, k * strength
    solved = _Inverse.apply((stronger @ k.transpose(-1, -2) * between).tril(-1))
    values, erased = solved @ (v * strength), solved @ (stronger * passed.exp().unsqueeze(-1))
    within = q @ k.transpose(-1, -2) * between
    asked = q * passed.exp().unsqueeze(-1)
    kept, added = passed[..., -1:].exp().unsqueeze(-1), (k * between[..., -1, :].unsqueeze(-1)).transpose(-1, -2)
    state = torch.zeros(*v.shape[:2], k.shape[-1], v.shape[-1], device=v.device)
    outputs = []
    for w, u, near, far, stays, adds in zip(
        *(one.unbind(2) for one in (erased, values, within, asked, kept, added)), strict=True
    ):
        new = u - w @ state
        outputs.append(far @ state + near @ new)
        state = state * stays + adds @ new
    y = torch.stack(outputs, 2).flatten(2, 3)[:, :, :tokens]
    return y.transpose(1, 2).to(dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def _spread(x: Tensor, times: int) -> Tensor:
    """[b, s, groups, f] → [b, s, groups · times, f]."""
    return x.unsqueeze(3).expand(-1, -1, -1, times, -1).flatten(2, 3)


def _in_chunks(x: Tensor) -> Tensor:
    """[b, s, h, f] → [b, h, c, CHUNK, f], zeros after the end: they add nothing and decay nothing."""
    padded = F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % CHUNK))
    return padded.unflatten(2, (-1, CHUNK))


def _running_sum(x: Tensor) -> Tensor:
    """Sums of the first i + 1 numbers of the last dimension, by doubling: torch.cumsum on a GPU promises no order."""
    step = 1
    while step < x.shape[-1]:
        x = torch.cat((x[..., :step], x[..., step:] + x[..., :-step]), -1)
        step *= 2
    return x


class _Inverse(torch.autograd.Function):
    """(I + a)^-1 for a with zeros on and above the diagonal, [..., CHUNK, CHUNK]. dL/da = -Tᵀ (dL/dT) Tᵀ below it."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        found = torch.eye(2, device=a.device) - _diagonal(a, 2)
        while found.shape[-1] < CHUNK:
            size = found.shape[-1]
            first, second = found[..., ::2, :, :], found[..., 1::2, :, :]
            corner = -(second @ _diagonal(a, 2 * size)[..., size:, :size] @ first)
            upper = torch.cat((first, torch.zeros_like(first)), -1)
            found = torch.cat((upper, torch.cat((corner, second), -1)), -2)
        found = found.squeeze(-3)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (found,) = ctx.saved_tensors
        across = found.transpose(-1, -2)
        return -(across @ gradients[0] @ across).tril(-1)


def _diagonal(a: Tensor, size: int) -> Tensor:
    """[..., n, n] → [..., n/size, size, size]: the blocks on the diagonal."""
    blocks = a.unflatten(-2, (-1, size)).unflatten(-1, (-1, size))  # block row, row, block column, column
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
