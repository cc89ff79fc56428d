# SPDX-License-Identifier: Apache-2.0
"""Torch calls that no function mode sees, and functions of autograd that no transform of functorch sees.

On the CPU host every torch call, even `x.shape`, passes through Python (cpu.py: CudaMeansCpu), which takes longer
than a small operation itself. Code that asks for no CUDA device has no need of that.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def outside_modes[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Call `function` with torch's function modes switched off, where there are any."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._len_torch_function_stack():
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return called


class LayerFunction(torch.autograd.Function):
    """torch.autograd.Function for layers, whose `forward` and `backward` run outside of function modes.

    Its `apply` takes the host a third less time outside functorch: torch's looks at every argument for tensors that a
    transform of functorch has left behind. A training has none.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in {"forward", "backward"} & vars(cls).keys():
            setattr(cls, name, staticmethod(outside_modes(getattr(cls, name))))

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As torch.autograd.Function.apply."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]
