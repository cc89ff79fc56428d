"""The definition of rounding to MXFP8 against exact arithmetic: rational numbers and the types' own codes."""

from bisect import bisect_left
from fractions import Fraction
from math import inf

import pytest
import torch

from tests.definitions import mxfp8 as definition
from tests.operands import same_bits
from tp_invariant_recipes.kernels.cpu import fp8_cpu
from tp_invariant_recipes.kernels.gemm import mxfp8
from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups
from tp_invariant_recipes.kernels.gemm.quantize import E4M3, E5M2

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
