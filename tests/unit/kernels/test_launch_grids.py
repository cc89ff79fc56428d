"""Grids of the Triton kernels for long sequences. CUDA starts 65,535 programs along y and z, and 2^31 - 1 along x.

Fake tensors have shapes and no memory, so the launches of a GPU are seen without one.
"""

import importlib
import pkgutil

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tp_invariant_recipes import kernels, portable
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels import (
    activations,
    causal_conv,
    cross_entropy,
    delta_rule,
    group_norm,
    rms_norm,
    row_sums,
    tree_add,
)
from tp_invariant_recipes.kernels.gemm import fp8_tiles, grouped_gemm, mxfp8
from tp_invariant_recipes.kernels.gemm.quantize import E4M3
from tp_invariant_recipes.kernels.launch import ALONG_Y, Kernel
from tp_invariant_recipes.portable.ieee import adam as ieee_adam
from tp_invariant_recipes.portable.ieee import attention as ieee_attention
from tp_invariant_recipes.portable.ieee import attention_triton as ieee_attention_triton
from tp_invariant_recipes.portable.ieee import cached_attention, draw
from tp_invariant_recipes.portable.ieee import cross_entropy as ieee_cross_entropy
from tp_invariant_recipes.portable.ieee import norm as ieee_norm
from tp_invariant_recipes.portable.ieee import rotary as ieee_rotary
from tp_invariant_recipes.portable.ieee import router as ieee_router
from tp_invariant_recipes.portable.ieee import storage as ieee_samples
from tp_invariant_recipes.portable.ieee import swiglu as ieee_swiglu

ALONG_X = 2**31 - 1
HIDDEN, WIDE, VOCABULARY, EXPERTS, SHARDS = 8192, 28672, 262144, 512, 8


def fake(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")


def fp32(*shape):
    return fake(*shape, dtype=torch.float32)


def launches(rows):
    """Every kernel that is launched for `rows` tokens of a large model."""
    x, of_rows, index = fake(rows, 1, HIDDEN), fp32(rows), fake(rows, dtype=torch.int64)
    row_sums.add_rows(fake(rows, HIDDEN), index, fp32(VOCABULARY, HIDDEN))
    row_sums.row_sum(fake(rows, HIDDEN), fake(rows, 8, dtype=torch.int64))
    row_sums.token_sum(fake(rows, WIDE), SHARDS)
    tree_add.tree_add(fp32(SHARDS, rows, HIDDEN), fake(rows, HIDDEN))
    tree_add.tree_add(fp32(rows, 64), fp32(rows), rows)
    tree_add.peer_add([fp32(rows, HIDDEN)] * 8, fake(rows, HIDDEN))
    causal_conv.causal_conv_forward(
        conv := fake(SHARDS, rows, 2048), taps := fake(SHARDS, 2048, 4), fp32(SHARDS, 2048), 1
    )
    causal_conv.causal_conv_backward(conv, conv, taps, fp32(SHARDS, 2048), 1)
    group_norm.group_norm_forward(groups := fake(SHARDS, rows, 8, 128), weights := fake(SHARDS, 8, 128), 1e-6)
    group_norm.group_norm_backward(groups, groups, weights, fp32(SHARDS, rows, 8, 1))
    sizes = delta_rule.Heads(groups=2, heads=4, key=128, value=128)
    mixed, numbers = fake(SHARDS, rows, 1, 1024), fp32(SHARDS, rows, 1, 4)
    delta_rule.delta_rule_backward(fake(SHARDS, rows, 1, 512), mixed, numbers, numbers, sizes)
    row_sums.centred_rows(fake(rows, HIDDEN), torch.float32)
    for norm in (rms_norm, ieee_norm):
        norm.rms_norm_forward(x, weight := fake(HIDDEN), 1e-6)
        norm.rms_norm_backward(x, x, weight, fp32(rows, 1, 1), SHARDS, False)
    for loss in (cross_entropy, ieee_cross_entropy):
        loss.sum_of_exponentials(logits := fake(rows, VOCABULARY), of_rows, SHARDS)
        loss.softmax_gradient(logits, index, of_rows, of_rows, of_rows, SHARDS)
    ieee_cross_entropy.logarithm(of_rows)
    both, single = fake(rows, 2 * WIDE), fake(rows, WIDE)
    activations.weighted_activation(both, of_rows, "swiglu")
    activations.weighted_activation_backward(single, both, of_rows, "swiglu")
    activations.swiglu(both)
    activations.swiglu_backward(single, both)
    ieee_swiglu.swiglu(both, of_rows)
    ieee_swiglu.swiglu_backward(single, both, of_rows)
    ieee_swiglu.swiglu(both)
    ieee_swiglu.swiglu_backward(single, both)
    ieee_router.route_tokens(scores := fake(rows, EXPERTS), 8)
    chosen = fake(rows, EXPERTS, dtype=torch.bool)
    ieee_router.route_tokens_backward(scores, fp32(rows, EXPERTS), scores, chosen)
    ieee_rotary.rotate(q := fake(rows, 1, 64, 128), fp32(rows, 64), fp32(rows, 64))
    key = fake(rows, 1, 8, 128)
    attended = ieee_attention.attention_forward(q, key, key, 0.1)
    ieee_attention.attention_backward(q, q, key, key, attended, 0.1)
    ieee_adam.adam_step(*[[fp32(rows, HIDDEN)]] * 4, ieee_adam.adam_numbers(1, 1e-3, (0.9, 0.95), 1e-8, 0.1))
    ieee_samples.values(of_rows)
    of_tables = cached_attention.Spans(fake(rows, 2 + 16, dtype=torch.int32), index, 64, 1)
    cached_attention.cached_triton(q[:, 0], key[:, 0], key[:, 0], q[:, 0], of_tables, 0.1)
    cached_attention.store_triton(key[:, 0], key[:, 0], key[:, 0], key[:, 0], index)
    whole, counts, keys = fp32(rows, VOCABULARY), fake(rows, dtype=torch.int32), fake(rows, 3, dtype=torch.int64)
    draw.kept(whole, of_rows, fake(rows, 4, dtype=torch.float64))
    draw.race(whole, of_rows, counts, of_rows, keys, fake(rows, 2, dtype=torch.int32))
    mxfp8.sides(fake(rows // mxfp8.BLOCK * mxfp8.BLOCK, HIDDEN), E4M3)


@pytest.fixture
def grids(monkeypatch):
    """kernel → the grids of its launches."""
    results = {}
    monkeypatch.setattr(Kernel, "launch", lambda self, grid, *_, **__: results.setdefault(self, []).append(grid))
    with FakeTensorMode():
        yield results


pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


@pytest.mark.parametrize("rows", (70_000, 300_000))
def test_a_grid_for_many_tokens_can_be_launched(grids, rows):
    launches(rows)
    for kernel, sizes in grids.items():
        assert all(x <= ALONG_X and y <= ALONG_Y for x, y in sizes), (kernel.kernel.__name__, sizes)


def test_every_kernel_is_launched(grids):
    """But for the experts' four, whose first grid dimension is all that grows."""
    launches(70_000)
    every = {
        kernel
        for package in (kernels, portable)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        for kernel in vars(importlib.import_module(module.name)).values()
        if isinstance(kernel, Kernel)
    }
    assert every - grids.keys() == {
        tiles for item in (grouped_gemm, fp8_tiles) for tiles in (item.PRODUCT, item.WEIGHT_GRADIENT)
    }


def test_what_cannot_be_launched_is_reported_with_the_key():
    key = torch.empty(1, 8192, 8, 16, dtype=torch.bfloat16, device="meta")
    with pytest.raises(RunError, match=r"_ieee_attention_sum_of_heads: 65536 programs along y.*train.micro_batch_size"):
        ieee_attention_triton.SUM_OF_HEADS.launch((1, 65536), (key, key, key, key), (1, 8192, 0.1), ())
