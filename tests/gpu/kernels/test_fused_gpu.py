# SPDX-License-Identifier: Apache-2.0
"""What stands for Megatron's compiled functions has their bits, and no rank imports torch's compiler for them."""

import pytest
import torch
from megatron.core.fusions import fused_bias_dropout, fused_bias_swiglu

from tests.operands import same_bits
from tp_invariant_recipes.kernels import activations

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DTYPES = (torch.bfloat16, torch.float32)


def numbers(*shape, dtype, seed):
    """Of all magnitudes, with infinities and NaN."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(*shape, device="cuda", generator=generator)
    x *= torch.pow(2.0, torch.randint(-12, 8, shape, device="cuda", generator=generator))
    x.view(-1)[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", (64, 768, 3000, 3072, 12288))
def test_swiglu(features, dtype):
    x, dy = (numbers(517, width, dtype=dtype, seed=n) for n, width in enumerate((2 * features, features)))
    assert same_bits(activations.swiglu(x), fused_bias_swiglu.swiglu(x))
    assert same_bits(activations.swiglu_backward(dy, x), fused_bias_swiglu.swiglu_back(dy, x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_addition(dtype):
    x, residual = (numbers(517, 1, 4096, dtype=dtype, seed=n) for n in range(2))
    assert same_bits(residual + x, fused_bias_dropout.bias_dropout_add_fused_train((x, None), residual, 0.0))
