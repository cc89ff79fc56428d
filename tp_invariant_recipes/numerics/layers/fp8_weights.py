"""A weight in FP8, for the products of forward passes and, transposed, of input gradients: quantized once a step.

A weight keeps both with it. `changed`, which Megatron's buffers of gradients call as they are zeroed, has the next
forward pass quantize again. So does every forward pass without gradients, and every one that a CUDA graph captures,
whose replays know no steps. The backward pass of a forward pass reads what that has quantized.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.host.function_modes import outside_modes
from tp_invariant_recipes.kernels.quantized import E4M3, Quantized
from tp_invariant_recipes.numerics.products import quantize

KEPT = "fp8"  # attribute of a weight

_steps = [0]  # a count of `changed`


def changed() -> None:
    """Weights may have changed."""
    _steps[0] += 1


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """rows: [n, k]; columns: [k, n], the same numbers. step: of which they are; None: of every replay of a graph."""

    rows: Quantized
    columns: Quantized
    step: int | None


@outside_modes
def quantized(weight: Tensor, blockwise: bool, group: Any) -> Fp8Weight:
    """A weight for a forward pass, to be called before autograd's function, which hides whether there are gradients.

    group: of the ranks that hold the others of its shards; None: none do.
    """
    kept: Fp8Weight | None = getattr(weight, KEPT, None)
    capturing = _capturing(weight)
    if kept is not None and kept.step == _steps[0] and torch.is_grad_enabled() and not capturing:
        return kept
    numbers = weight.detach()
    both = quantize.of_blocks_both_ways(numbers) if blockwise else quantize.of_tensor_both_ways(numbers, E4M3, group)
    fresh = Fp8Weight(*both, None if capturing else _steps[0])
    setattr(weight, KEPT, fresh)
    return fresh


def _capturing(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()
