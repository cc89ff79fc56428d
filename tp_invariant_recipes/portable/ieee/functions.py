# SPDX-License-Identifier: Apache-2.0
"""Functions of autograd whose every operation is specified: torch's + - * / of fp32, portable/ieee/math.py, and folds.

A fold adds the upper half of a dimension to its lower half until one number is left (kernels/row_sums.py).
"""

from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.kernels.row_sums import folding_sum
from tp_invariant_recipes.portable.ieee.storage import function


class _Function(LayerFunction):
    """exp or sigmoid; the gradient is dy · y and dy · (y (1 - y))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        y = function(x, name)
        ctx.save_for_backward(y if name == "exp" else y * (1.0 - y))
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.saved_tensors[0], None


def exp(x: Tensor) -> Tensor:
    """e^x. x: fp32."""
    return _Function.apply(x, "exp")


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x). x: fp32."""
    return _Function.apply(x, "sigmoid")


class _Softplus(LayerFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0.0) + function(function(-x.abs(), "exp") + 1.0, "log")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * function(ctx.saved_tensors[0], "sigmoid")


def softplus(x: Tensor) -> Tensor:
    """max(x, 0) + log(1 + e^-|x|). x: fp32."""
    return _Softplus.apply(x)


def fold(x: Tensor, dim: int = -1) -> Tensor:
    """Return the fold over a dimension, which stays with size 1. No gradient."""
    return folding_sum(x.clone(), dim).unsqueeze(dim)


class _Total(LayerFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return fold(x).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return fold(gradients[0]).expand(ctx.shape)


def total(x: Tensor) -> Tensor:
    """Return the fold over the last dimension beside each of its numbers, in x's shape; the gradient is a fold, too."""
    return _Total.apply(x)


class _Spread(LayerFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        return x.unsqueeze(1).expand(-1, rows, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return folding_sum(gradients[0].clone(memory_format=torch.contiguous_format), 1), None


def spread(x: Tensor, rows: int) -> Tensor:
    """[n, …] → [n, rows, …], a parameter for each row; its gradient is a fold over the rows."""
    return _Spread.apply(x, rows)
