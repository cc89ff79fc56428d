"""Sums of other tensor cores than the definition's: a refusal names the one that a GPU has.

Ampere and Ada keep 24 bits: all recorded words of an A100, an A2, an RTX 1000 Ada and an L40S (tests/data/README.md),
of 8 products each. That a step has 8 products is MMA-Sim's model (arXiv 2511.10909).
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tp_invariant_recipes.portable import conformance


def ampere(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b of bf16, [m, k] and [k, n], on the CPU: 24 bits kept, 8 products at once.

    Zeros after every 8 numbers make a step of 16 one of 8, since a product of zeros changes nothing.
    """
    from tp_invariant_recipes.kernels.cpu import tensor_core_cpu  # loads numba

    return tensor_core_cpu.product(_spread(a), _spread(b.t()).t(), kept=24)


SUMS: tuple[tuple[str, Callable[[Tensor, Tensor], Tensor]], ...] = (
    ("it keeps 24 bits and adds 8 products at once, as Ampere and Ada cards do", ampere),
)


def name(recording: conformance.Recording, product: conformance.Product | None) -> str | None:
    """Name the sum that `product` is in all bf16 cases of a recording; None: no row of SUMS.

    product: of a device; None: the recording's own bits are what a device gave.
    """
    cases = [case for case in recording.cases if case.name.startswith("bf16/")]
    if not cases:
        return None
    bits = [case.bits if product is None else conformance.outputs(case, product) for case in cases]
    for text, other in SUMS:
        if all(
            np.array_equal(conformance.outputs(case, other), given) for case, given in zip(cases, bits, strict=True)
        ):
            return text
    return None


def _spread(x: Tensor) -> Tensor:
    """[m, k] → [m, 2 k], k rounded up to a multiple of 8, with 8 zeros after every 8 numbers."""
    m, k = x.shape
    groups = -(-k // 8)
    out = torch.zeros(m, groups, 16, dtype=x.dtype)
    out[:, :, :8] = torch.nn.functional.pad(x, (0, groups * 8 - k)).view(m, groups, 8)
    return out.view(m, groups * 16)
