"""kernels/gemm/quantize.py against a search for the nearest number and exact fractions."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from tp_invariant_recipes.kernels.gemm import quantize
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
