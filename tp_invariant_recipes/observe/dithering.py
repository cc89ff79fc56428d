# SPDX-License-Identifier: Apache-2.0
"""The last bit of every module's output, and of the gradient that arrives at it, moved at random.

Another layout adds in another order and so rounds otherwise, module by module. A dithered run shows how far that may
take every tensor of a step.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tp_invariant_recipes.numerics.gemm.cublas import trying
from tp_invariant_recipes.observe.placement import NOTHING, class_names

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Dither:
    """The hooks of a dithered run. Every rank draws the same numbers, so that equal replicas stay equal."""

    def __init__(self, models: Sequence[nn.Module], seed: int) -> None:
        """Dither all chunks of a model that is on its device. Hooks that come later see the dithered outputs."""
        device = next(p.device for chunk in models for p in chunk.parameters())
        self._generator = torch.Generator(device).manual_seed(seed)
        modules = (module for chunk in models for module in chunk.modules())
        self._handles = [
            module.register_forward_hook(self._after) for module in modules if not class_names(module) & set(NOTHING)
        ]

    def unhook(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return output if trying() else _mapped(output, self._output)

    def _output(self, x: Tensor) -> Tensor:
        if isinstance(x, nn.Parameter) or type(x) is not Tensor or not x.is_floating_point():
            return x
        moved = x + (dithered(x.detach(), self._generator) - x.detach())
        if moved.requires_grad:
            moved.register_hook(partial(dithered, generator=self._generator))
        return moved


def dithered(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each element moved by 1 ULP, up or down at random; zeros and what is not finite stay."""
    if x.element_size() not in _INTEGERS:
        return x
    bits = x.contiguous().view(_INTEGERS[x.element_size()])
    step = torch.randint(0, 2, bits.shape, generator=generator, device=x.device, dtype=bits.dtype) * 2 - 1
    moved = (bits + step).view(x.dtype)
    return torch.where((x != 0) & torch.isfinite(x) & torch.isfinite(moved), moved, x)


def _mapped(values: Any, function: Any) -> Any:
    if torch.is_tensor(values):
        return function(values)
    if type(values) in (tuple, list):
        return type(values)(_mapped(value, function) for value in values)
    return values
