# SPDX-License-Identifier: Apache-2.0
"""Clipping, AdamW and rounding in one launch on a GPU: the bits of Transformer Engine's kernels and of torch's copy, or
those of numerics=portable.
"""

import pytest
import torch

from tests.operands import same_bits
from tp_invariant_recipes.kernels import clipped_adam as kernel
from tp_invariant_recipes.numerics.megatron import optimizer_step
from tp_invariant_recipes.portable.ieee.adam import CLIPPED
from tp_invariant_recipes.portable.training import portable_adam

pytestmark = pytest.mark.gpu
SIZES = (1 << 17, 4096, 1028, 4)


def library(tensors, clip, settings):
    """The same, kernel by kernel."""
    from transformer_engine.pytorch.optimizers import multi_tensor_applier  # isort: skip -- it makes the next one known
    import transformer_engine_torch as te  # isort: skip

    p, g, m, v, copies = (list(x) for x in zip(*tensors, strict=True))
    skipped = torch.zeros(1, dtype=torch.int, device="cuda")
    if clip < 1.0:
        multi_tensor_applier(te.multi_tensor_scale, skipped, [g, g], clip)
    lr, (beta1, beta2), eps = settings.lr, settings.betas, settings.eps
    numbers = lr, beta1, beta2, eps, settings.step, True, 1, settings.weight_decay
    multi_tensor_applier(te.multi_tensor_adam, skipped, [g, p, m, v], *numbers)
    for copy, main in zip(copies, p, strict=True):
        copy.copy_(main)


def stated(tensors, clip, settings):
    """The same of numerics=portable."""
    for *numbers, copy in tensors:
        portable_adam(torch.optim.AdamW).one_by_one(*numbers, clip, settings)
        copy.copy_(numbers[0])


WAYS = {"library": (library, kernel.LIBRARY), "portable": (stated, CLIPPED)}


def drawn(lowest):
    """Tensors of every size, of numbers from 2^lowest on."""
    generator = torch.Generator("cuda").manual_seed(lowest)
    for size in SIZES:
        numbers = torch.randn(4, size, device="cuda", generator=generator)
        numbers *= torch.exp2(torch.randint(lowest, 4, numbers.shape, device="cuda", generator=generator))
        numbers[3].abs_()
        yield *(x.clone() for x in numbers), torch.zeros(size, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lowest", (-12, -149))
@pytest.mark.parametrize("step, clip", ((1, 0.37), (7, 1.0), (1000, 1e-3)))
def test_it_has_the_bits_of_one_kernel_after_the_other(way, lowest, step, clip):
    one_by_one, update = WAYS[way]
    tensors = [*drawn(lowest)]
    others = [tuple(x.clone() for x in of_parameter) for of_parameter in tensors]
    settings = kernel.Settings(step, 1.23e-3, (0.9, 0.95), 1e-8, 0.1)
    kernel.clipped_adam(tensors, clip, settings, update)
    one_by_one(others, clip, settings)
    for ours, theirs in zip(tensors, others, strict=True):
        assert all(same_bits(x, y) for x, y in zip(ours, theirs, strict=True))
    assert any(same_bits(x[1], y[1]) for x, y in zip(tensors, drawn(lowest), strict=True)) == (clip == 1.0)


@pytest.mark.parametrize("portable", (False, True), ids=WAYS)
def test_the_exactness_check_sees_another_arithmetic(monkeypatch, portable):
    from transformer_engine.pytorch.optimizers import FusedAdam

    kind = portable_adam(torch.optim.AdamW) if portable else FusedAdam
    adam = kind([torch.nn.Parameter(torch.ones(4, device="cuda"))])
    device = torch.device("cuda", 0)
    assert optimizer_step._trial(adam, device)
    real = optimizer_step.clipped_adam

    def rounded_otherwise(parameters, *how):
        real(parameters, *how)
        parameters[0][2].mul_(1 + 2.0**-23)

    monkeypatch.setattr(optimizer_step, "clipped_adam", rounded_otherwise)
    assert not optimizer_step._trial(adam, device)
