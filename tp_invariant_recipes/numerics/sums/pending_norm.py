"""The gradient norm in a step of Megatron's optimizer: read from the GPU only when a number is needed.

`ChainedOptimizer.step` asks for the norm, collects the gradients to clip, and then computes with the norm. Were it a
number from the start, the GPU would wait for the host to collect.
"""

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any

# Optimizers whose step is under way.
_under_way: list[Any] = []


class PendingNorm:
    """A norm that the GPU may still be computing. What Megatron's step does with a norm waits for it."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    @cached_property
    def value(self) -> float:
        """The number."""
        return self._read()

    def __float__(self) -> float:
        return self.value

    def __add__(self, other: float) -> float:
        return self.value + other

    def __gt__(self, other: float) -> bool:
        return self.value > other

    def __str__(self) -> str:
        return str(self.value)


def pending(read: Callable[[], float]) -> PendingNorm | float:
    """Return the norm that `read` waits for: pending for a step of `reading_late`, for all others the number."""
    return PendingNorm(read) if _under_way else read()


def reading_late(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for ChainedOptimizer.step of megatron.core.optimizer.optimizer, made from that function.

    Its caller gets a number.
    """

    @wraps(original)
    def step(self: Any) -> tuple[bool, float | None, int | None]:
        _under_way.append(self)
        try:
            updated, norm, zeros = original(self)
        finally:
            _under_way.pop()
        return updated, None if norm is None else float(norm), zeros

    return step
