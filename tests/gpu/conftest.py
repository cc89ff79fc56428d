# SPDX-License-Identifier: Apache-2.0
"""What tests on GPUs share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def settings_of_a_run():
    """torch's settings of products, as an invariant run has them."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_tf32
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_tf32 = False
    yield
    matmul.allow_bf16_reduced_precision_reduction, matmul.allow_tf32 = before
