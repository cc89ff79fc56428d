"""The CPU's form of the experts' activation: right, and row by row."""

import pytest
import torch
from torch.nn.functional import silu

from tp_invariant_recipes.kernels.activations import (
    Clamped,
    weighted_activation,
    weighted_activation_backward,
)

ALL = ("swiglu", "squared_relu", Clamped(1.702, 0.7, 1.0), Clamped(1.0, float("inf"), 0.5))


def _reference(x, p, kind):
    if isinstance(kind, Clamped):
        gate, up = x.chunk(2, -1)
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
        return gate * torch.sigmoid(kind.alpha * gate) * (up + kind.offset) * p.unsqueeze(1)
    if kind == "swiglu":
        gate, up = x.chunk(2, -1)
        return silu(gate) * up * p.unsqueeze(1)
    return x.relu() ** 2 * p.unsqueeze(1)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("kind", ALL, ids=str)
def test_it_and_its_gradients_are_those_of_autograd(kind, dtype):
    torch.manual_seed(0)
    x, p, dy = torch.randn(9, 64).to(dtype), torch.rand(9), torch.randn(9, 64 if kind == "squared_relu" else 32)
    wide, weight = x.double().requires_grad_(), p.double().requires_grad_()
    expected = _reference(wide, weight, kind)
    expected.backward(dy.to(dtype).double())
    error = 1e-6 if dtype == torch.float32 else 1e-2
    y = weighted_activation(x, p, kind)
    dx, dp = weighted_activation_backward(dy.to(dtype), x, p, kind)
    assert y.dtype == dx.dtype == dtype
    assert dp.dtype == torch.float32
    for result, correct in ((y, expected), (dx, wide.grad), (dp, weight.grad)):
        assert (result.double() - correct).norm() < error * correct.norm()
