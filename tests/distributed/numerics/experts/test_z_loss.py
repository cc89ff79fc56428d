"""The router's z-loss: one value and one gradient for every tp, those of Megatron's formula."""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import z_loss_func

from tests.distributed.ranks import on_ranks, sliced, terms
from tests.operands import same_bits
from tp_invariant_recipes.numerics.megatron.moe.router import _ZLoss
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

SHARDS, TOKENS, EXPERTS, COEFFICIENT = 8, 96, 8, 0.3


def _logits(seed=0):
    """Of tokens whose losses are large and small, so that their sums show the order of additions."""
    return terms(TOKENS, EXPERTS, seed=seed) / 8


def tree_loss(mesh):
    """The logged loss, and this rank's part of the gradient."""
    x = sliced(_logits(), 0, mesh).clone().requires_grad_()
    loss = _ZLoss.apply(x, COEFFICIENT / TOKENS, mesh, VirtualMesh(1, 1, 0))
    loss.backward(torch.tensor(2.0))
    return loss.detach(), x.grad


def stock(mesh):
    return torch.stack([z_loss_func(sliced(_logits(seed), 0, mesh), COEFFICIENT / mesh.size) for seed in range(8)])


def _everything(mesh):
    return *tree_loss(mesh), stock(mesh)


@pytest.fixture(scope="module")
def results():
    """Degree → what the ranks log, the gradient of the whole, what stock's ranks log."""
    return {size: [*zip(*on_ranks(size, SHARDS, _everything), strict=True)] for size in (1, 2, 4)}


def test_value_and_gradient_are_the_same_for_every_tp(results):
    (loss,), (gradient,), (logged,) = results[1]
    for size in (2, 4):
        (first, *others), gradients, _ = results[size]
        assert same_bits(first, loss)
        assert not any(others)
        assert same_bits(torch.cat(gradients), gradient)
    assert not same_bits(sum(results[4][2]), logged)  # the control


def test_they_are_those_of_megatrons_formula(results):
    (loss,), (gradient,), _ = results[1]
    x = _logits().double().requires_grad_()
    expected = z_loss_func(x, COEFFICIENT)
    expected.backward(torch.tensor(2.0, dtype=torch.float64))
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), x.grad, rtol=1e-5, atol=1e-9)
