# SPDX-License-Identifier: Apache-2.0
"""Convolution and norm of the invariant Mamba layer: right, and a shard's bits whatever lies beside it."""

import pytest
import torch
import torch.nn.functional as F

from tests.operands import normal
from tp_invariant_recipes.kernels import causal_conv, group_norm
from tp_invariant_recipes.numerics.layers.mamba import by_shard, joined_shards
from tp_invariant_recipes.numerics.layers.mamba import causal_conv as conv
from tp_invariant_recipes.numerics.layers.mamba import group_norm as norm

SHARDS, STEP, ROWS, CHANNELS = 4, 2, 96, 37


def conv_inputs(dtype=torch.float32):
    x, dy = (normal(SHARDS, ROWS, CHANNELS, seed=n).to(dtype) for n in (1, 2))
    return x, dy, normal(SHARDS, CHANNELS, causal_conv.TAPS, seed=3).to(dtype), normal(SHARDS, CHANNELS).to(dtype)


def norm_inputs(dtype=torch.float32):
    x, dy = (normal(SHARDS, ROWS, 3, 20, seed=n).to(dtype) for n in (1, 2))
    return x, dy, normal(SHARDS, 3, 20, seed=3).to(dtype)


def test_the_convolution_is_torchs():
    """Two sequences side by side: rows are [s, b], so the token before is two rows before."""
    x, dy, weight, bias = conv_inputs()
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = conv(*leaves, STEP)
    y.backward(dy)
    x64, weight64, bias64 = (t.detach().double().requires_grad_() for t in leaves)
    by_sequence = x64.unflatten(1, (-1, STEP)).permute(2, 0, 3, 1).flatten(1, 2)  # b, all channels, s
    y64 = F.conv1d(by_sequence, weight64.flatten(0, 1)[:, None], bias64.flatten(), padding=3,
                   groups=SHARDS * CHANNELS)[..., : ROWS // STEP]  # fmt: skip
    y64 = F.silu(y64).unflatten(1, (SHARDS, -1)).permute(1, 3, 0, 2).flatten(1, 2)
    y64.backward(dy.double())
    torch.testing.assert_close(y.double(), y64, rtol=1e-5, atol=1e-5)
    for leaf, expected in zip(leaves, (x64, weight64, bias64), strict=True):
        torch.testing.assert_close(leaf.grad.double(), expected.grad, rtol=1e-4, atol=1e-4)


def test_the_norm_is_torchs():
    x, dy, weight = norm_inputs()
    leaves = [t.requires_grad_() for t in (x, weight)]
    y = norm(*leaves, 1e-5)
    y.backward(dy)
    x64, weight64 = (t.detach().double().requires_grad_() for t in leaves)
    y64 = F.rms_norm(x64, (20,), eps=1e-5) * weight64[:, None]
    y64.backward(dy.double())
    torch.testing.assert_close(y.double(), y64, rtol=1e-5, atol=1e-5)
    for leaf, expected in zip(leaves, (x64, weight64), strict=True):
        torch.testing.assert_close(leaf.grad.double(), expected.grad, rtol=1e-4, atol=1e-4)


def test_other_widths_and_rows_with_gaps_are_refused():
    x, _, weight, bias = conv_inputs()
    for wrong in ((x, weight[..., :3]), (x[..., ::2], weight)):
        with pytest.raises(ValueError, match="4 weights a channel and contiguous rows"):
            causal_conv.causal_conv_forward(*wrong, bias, STEP)
    with pytest.raises(ValueError, match="one after the other"):
        group_norm.group_norm_forward(norm_inputs()[0][..., ::2], weight, 1e-5)


def test_shards_first_and_back():
    """Rank 1 of 2, V = 4: of every segment its shards 2 and 3."""
    segments = [torch.arange(8.0).view(1, 8), torch.arange(10.0, 14.0).view(1, 4)]
    shards = by_shard([segment.chunk(2, 1)[1] for segment in segments], 2)
    assert shards.tolist() == [[[4.0, 5.0, 12.0]], [[6.0, 7.0, 13.0]]]
    assert shards.is_contiguous()
    assert by_shard([segments[0].squeeze(0), segments[1].squeeze(0)], 4, 0).tolist()[1] == [2.0, 3.0, 11.0]
    assert torch.equal(joined_shards(by_shard([segments[0]], 4)), segments[0])
