"""Megatron's fused functions without torch's compiler, with the same bits where a run needs no more of them.

Each rank would import the compiler and compile them, which takes longer than all else of a start.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.kernels import swiglu as kernel


def compile_nothing(*_: Any) -> None:
    """Replace Bridge's `set_jit_fusion_options`, which compiles forms with biases and dropout by calling them."""


def residual_add(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replace `bias_dropout_add_fused_train`: without a bias and dropout it is one addition."""

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        if bias is None and not prob and x.dtype == residual.dtype:
            return residual + x
        return original(x_with_bias, residual, prob)

    return add


def swiglu(original: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Replace `swiglu`: [rows, 2f] → [rows, f]."""
    return lambda x: kernel.swiglu(x) if _taken(x) else original(x)


def swiglu_back(original: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Replace `swiglu_back`: gradient [rows, f] and input [rows, 2f] → the input's gradient."""
    return lambda dy, x: kernel.swiglu_backward(dy, x) if _taken(dy, x) else original(dy, x)


def _taken(*operands: Tensor) -> bool:
    """Whether the kernel takes them, outside other functions that are compiled."""
    return not torch.compiler.is_compiling() and all(
        x.is_cuda and x.dim() == 2 and x.is_contiguous() and x.dtype == operands[0].dtype for x in operands
    )
