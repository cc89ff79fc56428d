"""What tests on GPUs share."""

import pytest
import torch


@pytest.fixture
def settings_of_a_run():
    """torch's settings of products, as an invariant run has them, and one seed."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_tf32
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_tf32 = False
    torch.manual_seed(0)
    yield
    matmul.allow_bf16_reduced_precision_reduction, matmul.allow_tf32 = before
