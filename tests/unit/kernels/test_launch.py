# SPDX-License-Identifier: Apache-2.0
"""Launches through the C function of Triton's launcher have the arguments that Triton itself gives it.

Grids of the Triton kernels for long sequences. CUDA starts 65,535 programs along y and z, and 2^31 - 1 along x.

Fake tensors have shapes and no memory, so the launches of a GPU are seen without one."""

import importlib
import pkgutil
from types import SimpleNamespace

import pytest
import torch
import triton
from torch._subclasses import FakeTensorMode
from triton.backends.nvidia.driver import CudaLauncher

from tp_invariant_recipes import kernels, portable
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels import (
    activations,
    causal_conv,
    cross_entropy,
    delta_rule,
    group_norm,
    launch,
    message_digest,
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
from tp_invariant_recipes.portable.ieee import delta_rule as ieee_delta
from tp_invariant_recipes.portable.ieee import norm as ieee_norm
from tp_invariant_recipes.portable.ieee import rotary as ieee_rotary
from tp_invariant_recipes.portable.ieee import router as ieee_router
from tp_invariant_recipes.portable.ieee import storage as ieee_samples
from tp_invariant_recipes.portable.ieee import swiglu as ieee_swiglu

NUMBERS, CONSTANTS, GRID, STREAM = (640, 1e-6), (8, True), (5, 3), 77


@triton.jit
def _kernel(x, y, n, eps, WIDTH, FLAG):
    pass


@pytest.fixture
def compiled(monkeypatch):
    """A compiled kernel whose C function notes its arguments in `seen`; `as_triton` notes Triton's own launches."""
    launcher = CudaLauncher.__new__(CudaLauncher)  # whose constructor compiles for a GPU
    launcher.num_ctas, launcher.launch_cooperative_grid, launcher.launch_pdl = 1, False, True
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = 1
    seen, as_triton = [], []
    launcher.launch = lambda *arguments: seen.append(arguments)
    kernel = SimpleNamespace(run=launcher, function=123, packed_metadata=(4, 1, 256), seen=seen, as_triton=as_triton)

    def run(self, *arguments, grid, warmup, **options):
        as_triton.append((arguments, options))
        kernel.run(*grid, 1, STREAM, kernel.function, kernel.packed_metadata, None, None, None, *arguments)
        return kernel

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM)
    return kernel


def addresses(arguments):
    return tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)


@pytest.mark.parametrize("version", (triton.__version__, "3.9.0"))
def test_later_launches_have_the_arguments_of_the_first(compiled, monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    kernel, x, y = Kernel(_kernel), torch.zeros(64), torch.zeros(64)
    for _ in range(3):
        kernel.launch(GRID, (x, y), NUMBERS, CONSTANTS)
    assert len(compiled.as_triton) == 1
    assert len(compiled.seen) == 3
    first, second, third = compiled.seen
    assert addresses(first) == addresses(second) == addresses(third)
    assert not any(isinstance(a, torch.Tensor) for a in second)


def test_other_kinds_are_compiled_by_triton(compiled):
    kernel, x = Kernel(_kernel), torch.zeros(64)
    aligned, shifted = (x, x), (x[1:], x)
    kernel.launch(GRID, aligned, NUMBERS, CONSTANTS)
    kinds = (
        (shifted, NUMBERS, CONSTANTS, 4),
        (aligned, (launch._FITS, 1.0), CONSTANTS, 4),
        (aligned, NUMBERS, (16, True), 4),
        (aligned, NUMBERS, CONSTANTS, 8),
        ((x.bfloat16(), x), NUMBERS, CONSTANTS, 4),
    )
    for count, (tensors, numbers, constants, warps) in enumerate(kinds, 2):
        kernel.launch(GRID, tensors, numbers, constants, warps)
        assert len(compiled.as_triton) == count
    kernel.launch(GRID, aligned, NUMBERS, CONSTANTS)  # the control: the first kind is still known
    assert len(compiled.as_triton) == len(kinds) + 1


@pytest.mark.parametrize("version, scratch, direct", (("3.6.0", 0, True), ("3.6.0", 16, False), ("3.9.0", 0, False)))
def test_triton_s_launcher_allocates_scratch_memory_and_knows_its_c_function(
    compiled, monkeypatch, version, scratch, direct
):
    monkeypatch.setattr(triton, "__version__", version)
    compiled.run.global_scratch_size = scratch
    assert launch._entry(compiled)[0] is (compiled.run.launch if direct else compiled.run)


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
    cross_entropy.log_probabilities(logits, of_rows, of_rows)
    cross_entropy.count_greater(logits, of_rows)
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
    ieee_adam.adam_step(*[fp32(rows, HIDDEN)] * 4, ieee_adam.adam_numbers(1, 1e-3, (0.9, 0.95), 1e-8, 0.1))
    ieee_samples.values(of_rows)
    walked = fp32(rows, 4, 128), fp32(rows, 4, 128), fp32(rows, 4, 128), fp32(rows, 4), fp32(rows, 4)
    ieee_delta.delta_rule(ieee_delta.Numbers(*walked), fake(rows, 4, dtype=torch.int32), 1, fp32(9, 4, 128, 128))
    of_tables = cached_attention.Spans(fake(rows, 2 + 16, dtype=torch.int32), index, 64, 1)
    cached_attention.cached_triton(q[:, 0], key[:, 0], key[:, 0], q[:, 0], of_tables, 0.1)
    cached_attention.store_triton(key[:, 0], key[:, 0], key[:, 0], key[:, 0], index)
    whole, counts, keys = fp32(rows, VOCABULARY), fake(rows, dtype=torch.int32), fake(rows, 3, dtype=torch.int64)
    draw.draw(whole, keys, fake(rows, 4, dtype=torch.float64))
    draw.race(whole, of_rows, counts, of_rows, keys, fake(rows, 2, dtype=torch.int32))
    message_digest.add_digests(message_digest.words(fake(8, rows, HIDDEN)), fake(16, dtype=torch.int64), 0, 0)
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
