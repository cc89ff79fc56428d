# SPDX-License-Identifier: Apache-2.0
"""Operands of FP8 products by Transformer Engine's kernels: all bits of the definition in products/quantize.py."""

import pytest
import torch

from tests.operands import same_bits
from tests.unit.kernels.gemm.test_quantize import operand
from tp_invariant_recipes.kernels.gemm import mxfp8
from tp_invariant_recipes.kernels.gemm import quantize as definition
from tp_invariant_recipes.kernels.gemm.quantize import E4M3, E5M2
from tp_invariant_recipes.numerics.gemm import quantize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ROWS, K = 384, 512
DTYPES = (E4M3, E5M2)


def _normal(generator):
    return torch.randn(ROWS, K, generator=generator)


def _wide(generator):
    """Every block and row has a magnitude of its own, from 2**-100 to 2**100."""
    exponents = torch.randint(-100, 100, (ROWS, K // 128), generator=generator).float()
    return _normal(generator) * torch.exp2(exponents).repeat_interleave(128, 1)


def _subnormal(generator):
    """Scales overflow fp32, or are near it."""
    return _normal(generator) * 2.0**-126


def _sparse(generator):
    """Blocks of zeros, of both signs."""
    return _wide(generator) * (torch.rand(ROWS, K // 128, generator=generator) < 0.3).repeat_interleave(128, 1)


def _ties(generator):
    """Every bf16 number of a few exponents: many lie half-way between two of FP8."""
    bits = torch.arange(0x3A00, 0x3A00 + ROWS * K // 64, dtype=torch.int32).repeat(64)[torch.randperm(ROWS * K)]
    return bits.to(torch.int16).view(torch.bfloat16).view(ROWS, K).float()


KINDS = (_normal, _wide, _subnormal, _sparse, _ties)


def _operand(kind):
    return kind(torch.Generator().manual_seed(0)).bfloat16().cuda()


def _unequal(result, expected):
    """How many numbers and scales differ."""
    data = result.data.view(torch.uint8) != expected.data.view(torch.uint8)
    scales = result.scale.reshape(-1).view(torch.int32) != expected.scale.reshape(-1).view(torch.int32)
    return int(data.sum()), int(scales.sum())


@pytest.fixture(autouse=True)
def _library():
    assert quantize._has_library()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_one_scale_a_tensor(kind, dtype):
    x = _operand(kind)
    result = quantize.of_tensor(x, dtype, None)
    expected = definition.of_tensor(x, definition.largest_magnitude(x), dtype)
    assert _unequal(result, expected) == (0, 0)
    assert _unequal(quantize.transposed(result), definition.transposed(expected)) == (0, 0)
    rows, columns = quantize.of_tensor_both_ways(x, dtype, None)
    assert _unequal(rows, expected) == _unequal(columns, definition.transposed(expected)) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_blocks_of_128_along_rows_and_columns(kind, dtype):
    x = _operand(kind)
    assert _unequal(quantize.along_rows(x, dtype), definition.along_rows(x, dtype)) == (0, 0)
    assert _unequal(quantize.along_columns(x, dtype), definition.along_rows(x.t(), dtype)) == (0, 0)
    rows, columns = quantize.along_both(x, dtype)
    assert _unequal(rows, definition.along_rows(x, dtype)) == (0, 0)
    assert _unequal(columns, definition.along_rows(x.t(), dtype)) == (0, 0)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_blocks_of_128_by_128(kind):
    x = _operand(kind)
    (rows, columns), expected = quantize.of_blocks_both_ways(x), definition.of_blocks(x, E4M3)
    assert _unequal(rows, expected) == (0, 0)
    assert _unequal(columns, definition.transposed(expected)) == (0, 0)


@pytest.mark.parametrize("blockwise", (False, True))
def test_a_weight_is_requantized_into_its_memory(blockwise):
    """In steps, and in replays of a CUDA graph, which allocates nothing for it."""
    weights = [_operand(kind) for kind in KINDS]
    (rows, columns), repeated = quantize.of_weight(weights[0], blockwise, None)
    weight = weights[1].clone()
    repeated(weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        repeated(weight)
    assert torch.cuda.memory_allocated() - before < ROWS * K
    for other in weights:
        weight.copy_(other)
        graph.replay()
        amax = definition.largest_magnitude(other)
        expected = definition.of_blocks(other, E4M3) if blockwise else definition.of_tensor(other, amax, E4M3)
        assert _unequal(rows, expected) == _unequal(columns, definition.transposed(expected)) == (0, 0)


def test_a_definition_on_a_gpu_is_that_on_a_cpu():
    for kind in KINDS:
        x = _operand(kind)
        for form in (definition.along_rows, definition.of_blocks):
            here, there = form(x, E4M3), form(x.cpu(), E4M3)
            assert torch.equal(here.data.cpu().view(torch.uint8), there.data.view(torch.uint8))
            assert torch.equal(here.scale.cpu(), there.scale)


@pytest.mark.parametrize("rows", (True, False))
def test_weights_anywhere_in_memory_are_rounded_in_one_launch(rows):
    weights = [operand("wide", 64, K, seed) for seed in range(3)]
    there = [weight.cuda() for weight in weights]
    shifted = [torch.cat((item.new_zeros(n), item.flatten()))[n:].view(item.shape) for n, item in enumerate(there)]
    for subset in (there, shifted):
        results = mxfp8.of_weights(subset, rows=rows)
        assert all(same_bits(a.cpu(), b) for a, b in zip(results, mxfp8.of_weights(weights, rows=rows), strict=True))
    other = mxfp8.of_weights(there, rows=not rows)
    assert not any(same_bits(a, b) for a, b in zip(results, other, strict=True))
