"""The gated delta rule in chunks is the rule token by token, forward and backward, to the rounding of fp32."""

import pytest
import torch

from tp_invariant_recipes.numerics.layers.delta_net import CHUNK, _Inverse, gated_delta_rule

BATCH, GROUPS, HEADS, KEY, VALUE = 2, 2, 4, 8, 12


def _operands(tokens):
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((GROUPS, KEY), (GROUPS, KEY), (HEADS, VALUE), (HEADS,), (HEADS,))
    of_tokens = [torch.randn(BATCH, tokens, *shape, generator=generator) for shape in shapes]
    slow = torch.rand(HEADS, generator=generator) * 3.0 - 6.0  # the state outlives a chunk
    return [*of_tokens, slow, torch.randn(HEADS, generator=generator)]


def _token_by_token(q, k, v, alpha, beta, log_a, dt_bias):
    unit = [one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k)]
    q, k = (one.repeat_interleave(HEADS // GROUPS, 2) for one in unit)
    decay = (-log_a.exp() * torch.nn.functional.softplus(alpha + dt_bias)).exp()
    state, found = torch.zeros(BATCH, HEADS, KEY, VALUE, dtype=v.dtype), []
    for t in range(v.shape[1]):
        state = state * decay[:, t, :, None, None]
        old = (state * k[:, t, :, :, None]).sum(2)
        new = beta[:, t].sigmoid().unsqueeze(-1) * (v[:, t] - old)
        state = state + k[:, t, :, :, None] * new.unsqueeze(2)
        found.append((state * q[:, t, :, :, None]).sum(2) * KEY**-0.5)
    return torch.stack(found, 1)


def _both(rule, operands, dtype):
    inputs = [one.to(dtype).requires_grad_() for one in operands]
    output = rule(*inputs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [output, *torch.autograd.grad(output, inputs, weights)]


@pytest.mark.parametrize("tokens", (CHUNK, 2 * CHUNK + 37))
def test_it_is_the_rule(tokens):
    ours = _both(gated_delta_rule, _operands(tokens), torch.float32)
    exact = _both(_token_by_token, [one.double() for one in _operands(tokens)], torch.float64)
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(ours, exact, strict=True)]
    assert max(errors) < 1e-4, errors


def test_the_inverse_is_one():
    a = torch.randn(3, CHUNK, CHUNK, generator=torch.Generator().manual_seed(0)).tril(-1) * 0.2
    product = (torch.eye(CHUNK) + a) @ _Inverse.apply(a)
    assert (product - torch.eye(CHUNK)).abs().max() < 1e-4
