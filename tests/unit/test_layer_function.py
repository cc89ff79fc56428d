# SPDX-License-Identifier: Apache-2.0
"""Functions of autograd of our layers: torch's own, with fewer looks at functorch."""

import pytest
import torch

from tp_invariant_recipes.function_modes import LayerFunction


class _Doubled(LayerFunction):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, dy):
        assert ctx.needs_input_grad == (True, False)
        return dy * ctx.factor, None


def test_it_has_a_gradient():
    x = torch.ones(3, requires_grad=True)
    y = _Doubled.apply(x, 2)
    y.sum().backward()
    assert y.tolist() == x.grad.tolist() == [2.0, 2.0, 2.0]


def test_a_transform_of_functorch_is_refused_as_by_torch():
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: _Doubled.apply(x, 2).sum())(torch.ones(3))
