# SPDX-License-Identifier: Apache-2.0
"""kernels/gemm/quantize.py against a search for the nearest number and exact fractions. The definition of rounding to
MXFP8 against exact arithmetic: rational numbers and the types' own codes.
"""

from bisect import bisect_left
from fractions import Fraction
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.definitions import mxfp8 as definition
from tests.operands import same_bits
from tp_invariant_recipes.kernels.cpu import fp8_cpu
from tp_invariant_recipes.kernels.gemm import mxfp8, quantize
from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups
from tp_invariant_recipes.kernels.gemm.quantize import E4M3, E5M2

DTYPES = (E4M3, E5M2)


def _finite(dtype):
    """All finite numbers of a type, in order; the even mantissas are at even places of each sign."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return codes[torch.isfinite(codes)].unique()


def _nearest(values, dtype):
    """The nearest number of the type, of two equally near the one whose last bit is 0."""
    numbers = _finite(dtype).double()
    distance = (values.double()[:, None] - numbers).abs()
    best = distance.amin(1, keepdim=True)
    even = torch.tensor([int(n.float().to(dtype).view(torch.uint8)) % 2 == 0 for n in numbers])
    return numbers[((distance == best).double() + ((distance == best) & even).double()).argmax(1)].float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cast_rounds_to_the_nearest_even_number_and_saturates(dtype):
    values = torch.arange(-32768, 32768, 7, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = values[torch.isfinite(values)]
    result = quantize.cast(values, torch.ones(()), dtype).float()
    near = values.abs() < 2.0**20  # in fp64 the distances of others are equal
    assert torch.equal(result[near], _nearest(values[near], dtype))
    assert torch.equal(result[~near], values[~near].sign() * quantize.LARGEST[dtype])
    assert result.abs().max() == quantize.LARGEST[dtype] == torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scale_is_the_nearest_quotient_or_the_power_of_two_below(dtype):
    amax = torch.cat([torch.rand(200, generator=torch.Generator().manual_seed(1)) * 2.0**e for e in (-140, -20, 0, 90)])
    amax = amax[amax > 0]
    plain, powers = quantize.scales(amax, dtype), quantize.scales(amax, dtype, power_of_two=True)
    largest = Fraction(quantize.FP32_LARGEST)
    for a, first, other in zip(amax.tolist(), plain.tolist(), powers.tolist(), strict=True):
        exact = Fraction(quantize.LARGEST[dtype]) / Fraction(a)
        assert abs(Fraction(first) - min(exact, largest)) <= Fraction(first) / 2**24
        assert Fraction(other) <= Fraction(first) < 2 * Fraction(other)
        assert Fraction(other).numerator == 1 or Fraction(other).denominator == 1
        numerator = max(Fraction(other).numerator, Fraction(other).denominator)
        assert numerator & (numerator - 1) == 0


def test_what_has_no_quotient_has_the_scale_one():
    amax = torch.tensor([0.0, float("inf"), float("nan")])
    assert quantize.scales(amax, E4M3).tolist() == [1.0, 1.0, 1.0]
    x = torch.zeros(128, 128, dtype=torch.bfloat16)
    assert quantize.along_rows(x, E4M3).scale.unique().tolist() == [1.0]


def test_every_block_has_a_scale_of_its_own_and_its_largest_number_nearly_fills_the_type():
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[:128, :128] *= 1000
    rows, blocks = quantize.along_rows(x, E4M3), quantize.of_blocks(x, E4M3)
    for q, spread in ((rows, (1, 128)), (blocks, (128, 128))):
        back = q.data.float() * q.scale.repeat_interleave(spread[0], 0).repeat_interleave(spread[1], 1)
        assert ((back - x.float()).abs() <= x.float().abs() / 16 + q.scale.max() * 2.0**-10).all()
        assert torch.equal(torch.exp2(torch.log2(q.scale).round()), q.scale)
    assert blocks.scale[0, 0] > 100 * blocks.scale[1:].max()
    assert (rows.data.float().unflatten(1, (-1, 128)).abs().amax(2) >= 224).all()
    transposed = quantize.transposed(blocks)
    assert torch.equal(transposed.data.float(), blocks.data.float().t())
    assert torch.equal(transposed.scale, blocks.scale.t())


def test_a_tensor_has_the_scale_of_the_amax_it_is_given():
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    alone = quantize.of_tensor(x, quantize.largest_magnitude(x), E4M3)
    shared = quantize.of_tensor(x, quantize.largest_magnitude(x) * 2, E4M3)
    assert alone.data.float().abs().max() == 448
    assert shared.scale == 2 * alone.scale


def test_each_group_of_rows_is_a_tensor_of_its_own():
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(0)).bfloat16() * torch.arange(1, 10)[:, None]
    counts = (4, 0, 2, 3)
    result = quantize.of_groups(x, torch.tensor(counts), E4M3)
    alone = [quantize.of_tensor(part, quantize.largest_magnitude(part), E4M3) for part in x.split(counts) if len(part)]
    assert torch.equal(result.data.float(), torch.cat([q.data.float() for q in alone]))
    assert result.scale.tolist() == [alone[0].scale, 1.0, alone[1].scale, alone[2].scale]


RECORDED = np.load(Path(__file__).parents[3] / "data" / "quantize_h100.npz")
CASES = sorted({key.rpartition("/")[0] for key in RECORDED.files})


def _same(result, data, scale):
    """Whether data and scales have the recorded bits; a NaN is any NaN."""
    dtype = result.data.dtype
    recorded = torch.from_numpy(RECORDED[data]).contiguous().view(dtype).float()
    scales = torch.from_numpy(RECORDED[scale]).reshape(result.scale.shape)
    return torch.equal(result.data.float().nan_to_num(1e9), recorded.nan_to_num(1e9)) and torch.equal(
        result.scale, scales
    )


@pytest.mark.parametrize("case", CASES)
def test_transformer_engine_gave_these_bits_on_an_h100(case):
    kind, _, dtype = case.split("/")
    dtype = {"e4m3": E4M3, "e5m2": E5M2}[dtype]
    x = torch.from_numpy(RECORDED[f"{case}/x"]).view(torch.bfloat16)
    if kind == "tensor":
        result = quantize.of_tensor(x, torch.from_numpy(RECORDED[f"{case}/amax"]), dtype)
        assert _same(result, f"{case}/data", f"{case}/scale")
        return
    rows = quantize.along_rows(x, dtype) if kind == "rows" else quantize.of_blocks(x, dtype)
    columns = quantize.along_rows(x.t(), dtype) if kind == "rows" else quantize.transposed(rows)
    assert _same(rows, f"{case}/data", f"{case}/scale")
    assert _same(columns, f"{case}/columns", f"{case}/column_scale")


@pytest.mark.parametrize("name, changed", (("EXPONENT_BITS", -1), ("LARGEST", {E4M3: 440.0, E5M2: 57000.0})))
def test_another_definition_has_other_bits(monkeypatch, name, changed):
    monkeypatch.setattr(quantize, name, changed)
    x = torch.from_numpy(RECORDED["rows/wide/e4m3/x"]).view(torch.bfloat16)
    assert not _same(quantize.along_rows(x, E4M3), "rows/wide/e4m3/data", "rows/wide/e4m3/scale")


def test_an_infinite_number_has_a_scale_of_its_own_size_and_a_nan_none():
    x = torch.tensor([1.0, -torch.inf, torch.nan])
    assert quantize._magnitudes(x).tolist() == [1.0, torch.inf, 0.0]


TYPES = (E4M3, E5M2)
EVERY_CODE = torch.arange(256).to(torch.uint8)


def _numbers(dtype):
    """The finite numbers of a type that are not below 0, by their codes."""
    return [Fraction(v) for v in EVERY_CODE[:128].view(dtype).double().tolist() if v < inf]


def _exact(block, dtype):
    """32 numbers of bf16 rounded by rational arithmetic."""
    numbers = _numbers(dtype)
    exact = [Fraction(v) for v in block]
    amax, power = max(map(abs, exact)), -127
    while numbers[-1] * Fraction(2) ** power < amax:
        power += 1
    results = []
    for value in exact:
        at = abs(value) / Fraction(2) ** power
        above = bisect_left(numbers, at)
        nearest = min((abs(numbers[n] - at), n % 2, n) for n in (above - 1, above) if n >= 0)[2]
        rounded = numbers[nearest] * Fraction(2) ** power
        results.append((-1 if value < 0 else 1) * (inf if rounded >= 2**128 else float(rounded)))
    return results


def operand(kind, rows=64, k=96, seed=0):
    """[rows, k] bf16 of a magnitude, of every one, of those near one of the ends, or of every bit pattern."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    if kind == "wide":
        x *= torch.exp2(torch.randint(-120, 120, (rows, k // 32), generator=generator)).repeat_interleave(32, 1)
    if kind == "ends":  # of each block, the largest number is the type's, and others are its smallest ones
        x = torch.randint(-9, 10, (rows, k), generator=generator) * 2.0**-9
        x[::32, ::32] = x[7::32, 3::32] = 448.0
        return x.bfloat16()
    if kind in ("small", "large"):
        x *= 2.0 ** (-126 if kind == "small" else 126)
    if kind == "ties":
        return torch.randint(0x3F00, 0x4300, (rows, k), generator=generator).to(torch.int16).view(torch.bfloat16)
    if kind == "bits":
        return torch.randint(-(2**15), 2**15, (rows, k), generator=generator).to(torch.int16).view(torch.bfloat16)
    largest = torch.finfo(torch.bfloat16).max
    return x.clamp(-largest, largest).bfloat16()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", ("normal", "wide", "small", "large", "ties", "ends"))
def test_rounding_is_that_of_rational_numbers(kind, dtype):
    x = operand(kind, rows=32, k=32)
    rows, columns = mxfp8.sides(x, dtype)
    assert [_exact(block, dtype) for block in x.view(-1, 32).tolist()] == rows.view(-1, 32).tolist()
    assert [_exact(block, dtype) for block in x.t().tolist()] == columns.t().tolist()
    assert same_bits(rows.signbit(), x.signbit())


@pytest.mark.parametrize("sizes", (None, (40, 0, 3, 32)), ids=("whole", "groups"))
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", ("wide", "small", "large", "bits", "ends"))
def test_a_cpu_has_the_bits_of_the_definition(monkeypatch, kind, dtype, sizes):
    """In parts, too."""
    monkeypatch.setattr(fp8_cpu, "SMALL", 0)
    groups = sizes and Groups(sizes, torch.tensor(sizes))
    x = operand(kind, rows=75 if groups else 64, k=160)
    expected = torch.empty_like(x), torch.empty_like(x)
    definition.by_torch(x, expected, dtype, True, True, groups)
    assert all(map(same_bits, mxfp8.sides(x, dtype, groups=groups), expected))


def test_scales_are_those_of_transformer_engine():
    """amax · (1/448 in fp32), rounded up to a power of two: for every amax of bf16, the least that is not exceeded."""
    amax = torch.arange(1, 0x7F80).to(torch.int16).view(torch.bfloat16)
    for dtype, largest in ((E4M3, 448), (E5M2, 57344)):
        reference = torch.exp2(
            torch.ceil(torch.log2((amax.float() * torch.tensor(1 / largest)).double())).clamp(min=-127)
        )
        block = torch.zeros(len(amax), 32, dtype=torch.bfloat16)
        block[:, 0] = amax
        expected = ((amax.double() / reference).float().to(dtype).double() * reference).bfloat16()
        assert same_bits(mxfp8.along_rows(block, dtype)[:, 0].contiguous(), expected)


def test_the_ends():
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, :6] = torch.tensor([inf, -inf, torch.nan, 3.0e38, -0.0, 2.0**-133])
    result = mxfp8.along_rows(x, E4M3)[0, :6]
    assert result[:2].tolist() == [inf, -inf]
    assert result[2].isnan()
    assert result[3:].tolist() == [2.0**127 * 1.75, 0.0, 0.0]
    assert result[4].signbit()
    largest = torch.finfo(torch.bfloat16).max
    assert mxfp8.along_rows(torch.full((1, 32), largest).bfloat16(), E4M3)[0].tolist() == [inf] * 32
    single = torch.full((1, 32), torch.nan).bfloat16()
    single[0, 7] = 1.0  # a NaN has no magnitude
    assert mxfp8.along_rows(single, E4M3)[0, 7] == 1.0
    least = torch.full((1, 32), 2.0**-133).bfloat16()
    assert same_bits(mxfp8.along_rows(least, E4M3), least)


def test_groups_begin_anew():
    x = operand("wide", rows=75)
    sizes = (40, 0, 3, 32)
    _, result = mxfp8.sides(x, E4M3, groups=Groups(sizes, torch.tensor(sizes)))
    for part, its in zip(x.split(sizes), result.split(sizes), strict=True):
        filled = torch.cat((part, torch.zeros(-len(part) % 32, 96, dtype=x.dtype)))  # zeros change nothing
        assert same_bits(mxfp8.along_columns(filled, E4M3)[: len(part)], its.contiguous())


def test_other_blocks_are_another_result(monkeypatch):
    """Controls: scales of 64 numbers, of the other dimension, and of the other type."""
    x = operand("wide", rows=64, k=64)
    rows, columns = mxfp8.sides(x, E4M3)
    assert not same_bits(rows, columns)
    assert not same_bits(rows, mxfp8.along_rows(x, E5M2))
    monkeypatch.setattr(definition, "BLOCK", 64)
    definition.by_torch(x, (other := torch.empty_like(x), x), E4M3, True, False, None)
    assert not same_bits(rows, other)


def test_what_blocks_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"blocks of 32 do not divide \[64, 40\]"):
        mxfp8.along_rows(operand("normal")[:, :40], E4M3)
    with pytest.raises(ValueError, match="blocks of 32 do not divide"):
        mxfp8.along_columns(operand("normal", rows=33), E4M3)
    with pytest.raises(TypeError, match="bf16"):
        mxfp8.along_rows(operand("normal").float(), E4M3)
