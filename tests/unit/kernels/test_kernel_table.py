"""What a part of the operands gives is that part of the whole, by the kernels' forms for a CPU."""

import pytest
import torch

from tests import kernel_table


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_parts_are_parts_of_the_whole(dtype):
    for row in kernel_table.sliced(large=False, dtype=dtype):
        row.check((2, 4))
