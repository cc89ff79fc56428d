# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in chunks is the rule token by token, forward and backward, to the rounding of fp32."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tp_invariant_recipes.kernels.delta_rule import CHUNK, Heads
from tp_invariant_recipes.numerics.layers.delta_net import gated_delta_rule

SHARDS, BATCH, SIZES = 2, 2, Heads(groups=2, heads=4, key=8, value=12)


def operands(tokens, sizes=SIZES, shards=SHARDS, batch=BATCH):
    """Of gated_delta_rule, without the sizes."""
    generator = torch.Generator().manual_seed(tokens)
    width = 2 * sizes.groups * sizes.key + sizes.heads * sizes.value
    of_tokens = [torch.randn(shards, tokens, batch, f, generator=generator) for f in (width, sizes.heads, sizes.heads)]
    slow = torch.rand(shards, sizes.heads, generator=generator) * 3.0 - 6.0  # the state outlives a chunk
    return [*of_tokens, slow, torch.randn(shards, sizes.heads, generator=generator)]


def token_by_token(x, alpha, beta, log_a, dt_bias, sizes):
    """The rule's definition, of all shards."""
    groups, heads, key, _ = sizes
    q, k, v = x.split((groups * key, groups * key, x.shape[-1] - 2 * groups * key), -1)
    unit = [item.unflatten(-1, (groups, key)) for item in (q, k)]
    unit = [item / (item.square().sum(-1, keepdim=True) + 1e-6).sqrt() for item in unit]
    q, k = (item.repeat_interleave(heads // groups, 3) for item in unit)
    v = v.unflatten(-1, (heads, -1))
    decay = (-log_a.exp()[:, None, None] * torch.nn.functional.softplus(alpha + dt_bias[:, None, None])).exp()
    state, result = torch.zeros(len(x), x.shape[2], heads, key, v.shape[-1], dtype=v.dtype), []
    for t in range(v.shape[1]):
        state = state * decay[:, t, ..., None, None]
        old = (state * k[:, t, ..., None]).sum(3)
        new = beta[:, t].sigmoid().unsqueeze(-1) * (v[:, t] - old)
        state = state + k[:, t, ..., None] * new.unsqueeze(3)
        result.append((state * q[:, t, ..., None]).sum(3) * key**-0.5)
    return torch.stack(result, 1).flatten(3)


def both(rule, operands, dtype, sizes=SIZES):
    """The rule's output, and the gradients of its operands from `gradient_of` it."""
    inputs = [operand.to(dtype).requires_grad_() for operand in operands]
    output = rule(*inputs, sizes)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient_of(output))]


def gradient_of(output):
    """The same for every shard."""
    drawn = torch.randn(output.shape[1:], generator=torch.Generator().manual_seed(1))
    return drawn.expand(output.shape).to(output)


def errors(actual, exact):
    """The relative error of every tensor."""
    return [((a - b).norm() / b.norm()).item() for a, b in zip(actual, exact, strict=True)]


@pytest.mark.parametrize("tokens", (CHUNK, 2 * CHUNK + 37))
def test_it_is_the_rule(tokens):
    actual = both(gated_delta_rule, operands(tokens), torch.float32)
    exact = both(token_by_token, operands(tokens), torch.float64)
    assert max(errors(actual, exact)) < 1e-4


class _Products(TorchDispatchMode):
    """Notes the shapes of all that a library multiplies or solves."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function.__name__.partition(".")[0] in ("bmm", "linalg_solve_triangular"):
            self.shapes.add((function.__name__, *(tuple(x.shape) for x in arguments[:2])))
        return function(*arguments, **named or {})


def test_the_shapes_of_products_do_not_depend_on_how_many_shards_a_rank_has():
    """A library may choose its order of additions by the number of matrices."""
    shapes = []
    for shards in (1, 4):
        with _Products() as products:
            both(gated_delta_rule, operands(CHUNK + 8, shards=shards), torch.float32)
        shapes.append(products.shapes)
    assert shapes[0] == shapes[1] != set()
