"""A weight in FP8 for forward passes and, transposed, for input gradients: quantized once a step.

A weight keeps both with it, in one place of memory for the whole run, in which CUDA graphs find them too. `changed`,
which Megatron's buffers of gradients call as they are zeroed, has the next forward pass quantize again. So does every
forward pass without gradients, and every one that a CUDA graph captures, whose replays know no steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import outside_modes
from tp_invariant_recipes.numerics.products import cublas, quantize

ATTRIBUTE = "fp8"  # attribute of a weight

_steps = [0]  # a count of `changed`


def changed() -> None:
    """Weights may have changed."""
    _steps[0] += 1


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """rows: [n, k]; columns: [k, n], the same numbers; Quantized.

    step: the step these weights belong to; None: every replay of a graph reads them.
    requantize: quantizes a weight into the memory of both; in_memory: the step whose numbers it holds now.
    """

    rows: Any
    columns: Any
    requantize: Callable[[Tensor], object]
    step: int | None
    in_memory: list[int | None]

    def of_backward(self) -> Any:
        """`columns`. Raises RuntimeError if a forward pass of another step came between."""
        now = self.in_memory[0]
        if now != self.step and None not in (now, self.step):
            raise RuntimeError(
                f"a weight {[*self.rows.data.shape]} was quantized again before a backward pass of the step before"
            )
        return self.columns


@outside_modes
def quantized(weight: Tensor, blockwise: bool, group: Any) -> Fp8Weight:
    """Return a weight for a forward pass, to be called before autograd's function, which hides whether there are
    gradients.

    group: of the ranks that hold the others of its shards; None: none do.
    """
    kept: Fp8Weight | None = getattr(weight, ATTRIBUTE, None)
    capturing = cublas.capturing(weight)
    if kept is not None and kept.step == _steps[0] and torch.is_grad_enabled() and not capturing:
        return kept
    step = None if capturing else _steps[0]
    if kept is None:
        (rows, columns), requantize = quantize.of_weight(weight.detach(), blockwise, group)
        kept = Fp8Weight(rows, columns, requantize, step, [step])
    else:
        kept.requantize(weight.detach())
        kept = replace(kept, step=step)
        kept.in_memory[0] = step
    setattr(weight, ATTRIBUTE, kept)
    return kept
