"""An infinity or a NaN times zeros, of the compiled sum: no number of a step's other operand tells how large it is."""

import numpy as np
import pytest
import torch

from tests.definitions.tensor_core_sum import NAN, bf16_product
from tp_invariant_recipes.kernels.cpu.tensor_core_cpu import bits_of, product


@pytest.mark.parametrize("special", (float("inf"), float("-inf"), float("nan")))
@pytest.mark.parametrize("side", ("left", "right"))
def test_a_special_number_meets_a_step_of_zeros_only(special, side):
    a, b = torch.zeros(3, 32), torch.zeros(32, 70)
    a[:, 16:], b[16:] = 1, 1  # after it, steps that are ordinary
    if side == "left":
        a[1, 3] = special
    else:
        b[3, 66] = special
    a, b = a.bfloat16(), b.bfloat16()
    result = product(a, b).numpy().view(np.uint32)
    assert (result == bf16_product(bits_of(a), bits_of(b))).all()
    assert (result == NAN).sum() == (70 if side == "left" else 3)
